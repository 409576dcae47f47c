"""Ways to get from tokens to heads around the projections of an attention layer."""
