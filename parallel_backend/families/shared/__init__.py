"""Helpers that several families share."""
