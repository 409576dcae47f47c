"""The options of ``bench``, apart from what needs torch."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--family", default="flux", help="shape of the model: flux or wan (default %(default)s)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT",
        help="repeatable (default ulysses=2, ring=2 and cfg=2; of --steps pipe=2, stale and exact ring=2, ulysses=2)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens",
        action="append",
        type=int,
        metavar="N",
        help="of the latent; repeatable (default 4096 and 1024)",
    )
    parser.add_argument("--text-tokens", type=int, default=128, metavar="N", help="of the text (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="steps of each, 10 without; of --steps loops of each, 3 without"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N",
        help="time whole step loops of so many steps, which is what pipe and stale are for, without peers",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="append", type=float, default=[], metavar="MBIT",
        help="of --steps, on two ranks: limit the link between them as well, in megabits a second; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers", action="store_true", help="of single steps: leave out diffusers' own parallelism and the like"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw the ratios, or with --link the seconds by link; needs Pillow"
    )
