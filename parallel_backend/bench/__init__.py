"""Timing a denoiser step under layouts, against one process and against peers: ``python -m parallel_backend bench``."""
