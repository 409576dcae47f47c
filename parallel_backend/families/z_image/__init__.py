"""Z-Image."""
