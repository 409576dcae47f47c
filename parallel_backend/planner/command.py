"""The command ``python -m parallel_backend plan``."""

import argparse
from pathlib import Path

from ..errors import InvalidRequest
from .hardware import description, shipped
from .hardware.description import Hardware
from .models import find
from .planning import plan
from .request import Prompt, prompt
from .table import as_json, table


def run(options: argparse.Namespace) -> int:
    """Print a plan, and return the exit status."""
    asked = prompt(
        find(options.model), options.size, steps=options.steps, guided=options.guidance, samples=options.batch,
        compiled=options.compile,
    )  # fmt: skip
    made = plan(asked, _hardware(options, asked), mode=options.mode)
    print(as_json(made) if options.json else table(made, every=options.all))
    return 0


def _hardware(options: argparse.Namespace, asked: Prompt) -> Hardware:
    if options.hardware is None:
        from .measured import of_this_machine

        if options.first is not None:
            raise InvalidRequest("--first is for a machine of --hardware; name devices with --devices here")
        return of_this_machine(options, asked)
    if options.devices is not None:
        raise InvalidRequest("--devices is for this machine; --first N takes the first devices of --hardware")
    return taken(described(options.hardware), options.first)


def described(name: str) -> Hardware:
    """Return a machine by the name of a file, or by its own.

    Raises:
        InvalidRequest: there is none, or the file is wrong.
    """
    path = Path(name)
    return description.read(path) if path.is_file() else shipped.machine(name)


def taken(hardware: Hardware, count: int | None) -> Hardware:
    """Return the first devices of a machine; all without a number.

    Raises:
        InvalidRequest: there are not so many.
    """
    if count is None:
        return hardware
    if not 1 <= count <= len(hardware.devices):
        raise InvalidRequest(f"--first {count}: {hardware.name} has {len(hardware.devices)} devices")
    return hardware.first(count)
