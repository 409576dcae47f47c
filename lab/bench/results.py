"""Shared by the commands ``bench wire``, ``bench memory``, ...: options, and printing of results."""

import argparse
from collections.abc import Iterable
from typing import Any

import msgspec

from parallel_backend.client import devices


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add ``--devices`` and ``--json``."""
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_results(measured: Iterable[Any], *, as_json: bool) -> int:
    """Print each result when it is ready, or all as JSON at the end. Return the exit status."""
    results = []
    for result in measured:
        results.append(result)
        if not as_json:
            print(result.describe(), flush=True)
    if as_json:
        print(msgspec.json.encode(results).decode())
    return int(any(result.failed for result in results))
