"""Holding every family under every layout to diffusers' own forward: ``python -m parallel_backend verify``."""
