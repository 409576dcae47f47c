"""Latte."""
