"""The command line of ``python -m parallel_backend certificates``."""

import argparse
from pathlib import Path

from ... import env
from ..links.address import check_host
from .files import make
from .tls import default_folder

DAYS = 825


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "--hosts", required=True, metavar="LIST",
        help="names and IP addresses by which other machines reach this one, as in first.example,10.0.0.1",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path,
        help=f"where the files are (default: {env.CERTIFICATES}, or a folder in the user's settings)",
    )  # fmt: skip
    parser.add_argument(
        "--days", type=_days, default=DAYS, metavar="N", help="days until they expire (default %(default)s)"
    )
    parser.add_argument(
        "--new", action="store_true", help="make a new authority and a new token as well; the old files are then void"
    )


def run(options: argparse.Namespace) -> int:
    """Make the files, and print what they are for."""
    hosts = tuple(dict.fromkeys(check_host(host, what="--hosts") for host in options.hosts.split(",")))
    folder = (options.folder or default_folder()).absolute()
    print(make(folder, hosts, days=options.days, new=options.new))
    return 0


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 36500:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 1 to 36500")
    return int(text)
