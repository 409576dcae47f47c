"""The options of ``bench``, kept apart from the modules that import torch."""

import argparse

from parallel_backend.client import devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    _add_model(parser)
    _add_timing(parser)
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print all results as one JSON document at the end")
    parser.add_argument(
        "--plot", metavar="FILE.png",
        help="draw the speedups, or with --link the seconds by link speed; needs matplotlib",
    )  # fmt: skip


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add what is timed: shapes and layouts."""
    parser.add_argument("--family", default="flux", help="shape of the model: flux or wan (default %(default)s)")
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT",
        help="a layout to time; repeatable (default ulysses=2, ring=2 and cfg=2; with --steps pipe=2, "
        '"ring=2 stale=previous", ulysses=2 and ring=2)',
    )  # fmt: skip
    parser.add_argument(
        "--tokens", action="append", type=int, metavar="N", help="latent tokens; repeatable (default 4096 and 1024)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="without --steps: what all compute in (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--text-tokens", type=int, default=128, metavar="N", help="text tokens (default %(default)s)")


def _add_timing(parser: argparse.ArgumentParser) -> None:
    """Add how it is timed, and beside what."""
    parser.add_argument(
        "--rounds", type=int, metavar="N",
        help="timed steps of each contestant (default 10); with --steps, timed loops of each layout (default 3)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, metavar="N",
        help="time whole step loops of N steps instead of single steps, without peers; pipe and stale layouts only "
        "pay off over several steps",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="append", type=float, default=[], metavar="MBIT",
        help="with --steps and layouts of two ranks: also time on a link limited to this many megabits a second; "
        "repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers", action="store_true",
        help="without --steps: leave out the parallelism of diffusers and of other projects",
    )  # fmt: skip
