"""Benchmarks of layouts against one process and against other projects: ``python -m parallel_backend bench``."""
