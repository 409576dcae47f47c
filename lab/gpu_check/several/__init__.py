"""Checks of two or more GPUs together: exchanges, overlap, speed against other projects, unlike cards."""
