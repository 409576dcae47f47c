"""The options of ``doctor``, kept apart from the modules that import torch."""

import argparse

from ..client import devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "--comfyui", metavar="PATH", help="ComfyUI's folder (default: the one whose custom_nodes this extension is in)"
    )
    parser.add_argument(
        "--report", metavar="FILE", nargs="?", const="",
        help="also write an archive for a bug report: these lines, status, versions and logs, without prompts, home "
        "folder, user and host name (default: parallel-dit-report-DATE.zip here)",
    )  # fmt: skip
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--markdown", action="store_true",
        help="print lines, status and versions as a text to paste into an issue, without what --report leaves out",
    )  # fmt: skip
