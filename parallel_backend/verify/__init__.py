"""A checkpoint in every kind of layout against diffusers' own forward: ``python -m parallel_backend verify MODEL``."""
