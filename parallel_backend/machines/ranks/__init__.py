"""What ranks do for clients and ranks on other machines: find files, and measure traffic between hosts."""

import sys

COMMAND = (sys.executable, "-m", f"{__name__}")
"""Starts such a rank; options are appended."""
