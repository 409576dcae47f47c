"""The options of ``bench``, apart from what needs torch."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--family", default="flux", help="shape of the model: flux or wan (default %(default)s)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT", help="repeatable (default ulysses=2, ring=2 and cfg=2)"
    )
    parser.add_argument(
        "--tokens",
        action="append",
        type=int,
        metavar="N",
        help="of the latent; repeatable (default 4096 and 1024)",
    )
    parser.add_argument("--text-tokens", type=int, default=128, metavar="N", help="of the text (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each (default %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out diffusers' own parallelism and the like")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the ratios; needs Pillow")
