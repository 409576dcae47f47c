"""Open-Sora 2.0."""
