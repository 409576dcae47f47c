"""A whole step loop, over links of several speeds."""
