"""Shared by the commands ``bench wire``, ``bench memory``, ...: options, and printing of results."""

import argparse
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import msgspec

from parallel_backend.client import devices, gpus
from parallel_backend.planner import record
from parallel_backend.protocol.model_spec import Devices

_PACKAGES = ("diffusers", "transformers")
"""Whose versions matter, besides those of torch and this extension."""


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
        print(document(results))
    return int(any(result.failed for result in results))


def document(results: Sequence[Any]) -> str:
    """Return results as JSON, with the command, the machine and the versions that they were measured with."""
    cards = tuple(range(gpus.count()))
    facts = record.facts_of(Devices(kind="cuda", indices=cards) if cards else Devices(kind="cpu", indices=(0,)))
    versions = {name: metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    machine = msgspec.to_builtins(facts) | versions
    command = shlex.join(["python", "-m", "lab", *sys.argv[1:]])
    return msgspec.json.encode({"command": command, "machine": machine, "results": results}).decode()
