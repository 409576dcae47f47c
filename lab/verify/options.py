"""The options of ``verify``, kept apart from the modules that import torch."""

import argparse

from parallel_backend.client import devices

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    _add_cells(parser)
    _add_other_comparisons(parser)
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_cells(parser: argparse.ArgumentParser) -> None:
    """Add what is compared: models, layouts and sizes."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a checkpoint's folder or name: compare this checkpoint with diffusers' own forward; without MODEL, "
        "compare small random models of every family",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, help="with MODEL: dtype to compute in (default: the loader's choice)"
    )
    parser.add_argument("--family", metavar="NAME", help="one family only, such as flux")
    parser.add_argument("--variant", metavar="NAME", help="one variant of a family only, such as dev")
    parser.add_argument(
        "--layout", metavar="LAYOUT", help='one layout only, such as "cfg=2 ulysses=2" (default: a matrix of layouts)'
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="only layouts of N ranks; with MODEL: the number of ranks to use"
    )
    parser.add_argument("--size", metavar="TxHxW", help="size of the latent; HxW for images")
    parser.add_argument("--text-tokens", type=int, metavar="N", help="length of the text in tokens")
    parser.add_argument("--ci", action="store_true", help="only the part of the matrix that CI runs")
    parser.add_argument("--named", action="store_true", help="only the part of the matrix with sizes from real use")


def _add_other_comparisons(parser: argparse.ArgumentParser) -> None:
    """Add what is done instead of comparing single forwards."""
    parser.add_argument(
        "--memory", action="store_true",
        help="instead: measure the memory that the ranks need for 2 GB of sharded weights",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", metavar="N|all",
        help="instead: run whole step loops of PipeFusion and displaced patch, whose first N steps are exact, and "
        "compare them with the same algorithm in one process; with all, also with the exact loop",
    )  # fmt: skip
    parser.add_argument(
        "--quality", action="store_true",
        help="instead: generate pictures with the shipped checkpoint and tabulate how far those of approximate layouts "
        "are from exact ones",
    )  # fmt: skip
    parser.add_argument(
        "--vae", metavar="KIND",
        help="instead: compare a VAE whose rows are split over --ranks N with diffusers' own; KIND is a small random "
        "VAE such as image or wan21, or a checkpoint's folder",
    )  # fmt: skip
    parser.add_argument("--encode", action="store_true", help="with --vae: encode instead of decode")
    parser.add_argument("--width", type=int, metavar="N", help="with --vae: channels of its first level (default 32)")
