"""The options of ``plan``, kept apart from the modules that import torch."""

import argparse

from ..client import devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="a file, a folder, or a published model's name")
    parser.add_argument("--size", required=True, metavar="WxHxF", help="pixels, and frames of a video: 832x480x81")
    parser.add_argument("--steps", type=int, default=20, help="steps of the sampling (default %(default)s)")
    parser.add_argument("--guidance", action="store_true", help="there is a negative prompt (cfg is not 1)")
    parser.add_argument("--batch", type=int, default=1, help="pictures or videos at once (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="blocks are compiled")
    parser.add_argument(
        "--mode", default="auto", metavar="MODE",
        help="auto, fastest, fit memory, fit memory over slow links, or allow approximate (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", metavar="FILE",
        help="a description of a machine as JSON, or the name of one that is described (without it, this machine is "
        "measured)",
    )  # fmt: skip
    parser.add_argument("--first", type=int, metavar="N", help="the first N devices of that machine alone")
    parser.add_argument("--again", action="store_true", help="measure this machine even if it has been measured")
    devices.add_option(parser)
    parser.add_argument("--all", action="store_true", help="show every layout")
    parser.add_argument("--json", action="store_true", help="print JSON")
