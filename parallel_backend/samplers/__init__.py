"""Deterministic samplers and prediction types: elementwise maths, no ranks."""
