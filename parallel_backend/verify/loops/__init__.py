"""Whole step loops, against the same algorithm in one process."""
