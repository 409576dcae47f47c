"""Chroma."""
