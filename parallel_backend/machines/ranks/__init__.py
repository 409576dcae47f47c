"""What ranks do where a client or other ranks are on other machines: find files, and measure what crosses."""

import sys

COMMAND = (sys.executable, "-m", f"{__name__}")
"""Starts such a rank; options are appended."""
