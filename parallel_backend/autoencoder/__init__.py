"""Decode and encode on all ranks: exactly, with every tensor of the VAE split by rows, or approximately, in tiles."""
