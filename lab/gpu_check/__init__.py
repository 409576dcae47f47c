"""What a machine with GPUs is to prove: ``bash scripts/gpu_check.sh``."""
