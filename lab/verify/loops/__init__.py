"""Whole step loops, compared with the same algorithm in one process."""
