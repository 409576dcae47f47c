"""Open-Sora 1.2."""
