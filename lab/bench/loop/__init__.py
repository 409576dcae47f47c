"""Whole step loops, timed over links of several speeds."""
