"""The options of ``verify``, apart from what needs torch."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--family", metavar="NAME", help="one family, such as flux; all without")
    parser.add_argument("--variant", metavar="NAME", help="one of its variants, such as dev; all without")
    parser.add_argument("--layout", metavar="LAYOUT", help='such as "cfg=2 ulysses=2"; those of the matrix without')
    parser.add_argument("--ranks", type=int, metavar="N", help="leave out layouts with another number of ranks")
    parser.add_argument("--size", metavar="TxHxW", help="of the latent; HxW for images")
    parser.add_argument("--text-tokens", type=int, metavar="N", help="length of the text")
    parser.add_argument("--ci", action="store_true", help="the part of the matrix that CI runs")
    parser.add_argument("--json", action="store_true", help="as JSON")
