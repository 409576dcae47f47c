"""Benchmarks of layouts against one process and against other projects: ``python -m lab bench``."""
