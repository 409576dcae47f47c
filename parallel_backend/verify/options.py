"""The options of ``verify``, kept apart from the modules that import torch."""

import argparse
import re

from ..client import devices
from ..errors import InvalidRequest

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "model", metavar="MODEL",
        help="a checkpoint's folder or name; in a checkout, python -m lab verify compares small models of every family",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="to compute in (default: the loader's choice)")
    parser.add_argument(
        "--layout", metavar="LAYOUT", help='one layout only, such as "cfg=2 ulysses=2" (default: every kind)'
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="the number of ranks to use (default: all devices)")
    add_sizes(parser)
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add what says how large the inputs are."""
    parser.add_argument("--size", metavar="TxHxW", help="size of the latent; HxW for images")
    parser.add_argument("--text-tokens", type=int, metavar="N", help="length of the text in tokens")


def size(text: str | None) -> tuple[int, ...] | None:
    """Return what ``--size`` says; None without it.

    Raises:
        InvalidRequest: it is no size.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d+(x\d+){1,2}", text):
        raise InvalidRequest(f"--size {text}: write TxHxW, or HxW for images, such as 3x30x52")
    return tuple(map(int, text.split("x")))


def check_least(options: argparse.Namespace, least: dict[str, int]) -> None:
    """Refuse numbers below the least that works.

    Args:
        options: the command line.
        least: by the name of the option.

    Raises:
        InvalidRequest: an option that is given is below its least.
    """
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise InvalidRequest(f"--{name.replace('_', '-')} {value}: at least {minimum} is needed")
