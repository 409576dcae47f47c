"""Mochi."""
