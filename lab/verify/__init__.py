"""Compares families, layouts, step loops and VAEs with diffusers, on small random models."""
