"""Checks for a machine with GPUs: ``bash scripts/gpu_check.sh``."""
