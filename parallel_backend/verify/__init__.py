"""Comparing every family, layout, step loop and VAE with diffusers: ``python -m parallel_backend verify``."""
