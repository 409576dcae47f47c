"""Decode and encode by all ranks: rows of a VAE's planes, exactly, or tiles."""
