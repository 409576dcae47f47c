"""The planner's predictions beside published scaling results: ``python -m lab plan published``."""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lab.bench.results import print_results
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware
from parallel_backend.planner.models import find
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import Prompt, prompt

FILE = Path(__file__).parent / "published.json"
NEAR = 0.2
"""The largest error that counts as reproduced."""
_ROOMY = 1e15
"""Bytes of a device: whether a request fits is not compared, since others hold weights in other ways."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published result, and what is predicted.

    Attributes:
        what: system, model and size.
        hardware: name of the machine.
        layout: the layout.
        published: how many times as fast as one device.
        predicted: the same.
        held_out: whether the row is of the half that was set aside.
    """

    what: str
    hardware: str
    layout: str
    published: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what is published."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows."""

    rows: tuple[Row, ...]

    @property
    def failed(self) -> bool:
        """Nothing is a failure: errors are reported."""
        return False

    def describe(self) -> str:
        """Format the rows, and sum up both halves."""
        lines = [f"{'':46} {'hardware':20} {'layout':24} {'published':>9} {'predicted':>9} {'error':>7}"]
        lines += [
            f"{row.what:46} {row.hardware:20} {row.layout:24} {row.published:9.2f} {row.predicted:9.2f} "
            f"{100 * row.error:6.0f}%{' held out' if row.held_out else ''}"
            for row in self.rows
        ]
        halves = (("set aside", True), ("the others", False))
        return "\n".join(
            [*lines, *(summary(name, [r for r in self.rows if r.held_out == held]) for name, held in halves)]
        )


def summary(name: str, rows: Sequence[Row]) -> str:
    """Sum up some rows."""
    errors = [abs(row.error) for row in rows]
    near = sum(error <= NEAR for error in errors)
    return (
        f"{name}: median error {100 * statistics.median(errors):.0f} %, {near} of {len(rows)} within {100 * NEAR:.0f} %"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", metavar="NAME", help="results of this model alone")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print all rows; return the exit status."""
    rows = [each for each in read() if options.model in (None, each["model"])]
    return print_results([Table(rows=tuple(map(compared, rows)))], as_json=options.json)


def read() -> list[dict[str, Any]]:
    """Return the published rows."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return found


def compared(row: Mapping[str, Any]) -> Row:
    """Predict what has been published."""
    hardware = _hardware(row["hardware"], row["attention"])
    asked = _prompt(row["model"], row["size"], row["steps"], row["guided"], row.get("compiled", False))
    layout = ParallelLayout.parse(row["layout"])
    one, several = (predict(asked, each, hardware.first(each.ranks)) for each in (ParallelLayout(), layout))
    return Row(
        what=f"{row['system']}, {row['model']} {row['size']}", hardware=row["hardware"], layout=row["layout"],
        published=row["seconds_of_one"] / row["seconds"], predicted=one.sampling / several.sampling,
        held_out=row["held_out"],
    )  # fmt: skip


@cache
def _prompt(model: str, size: str, steps: int, guided: bool, compiled: bool) -> Prompt:
    return prompt(find(model), size, steps=steps, guided=guided, compiled=compiled)


@cache
def _hardware(name: str, kernel: str) -> Hardware:
    machine = shipped.machine(name)
    devices = tuple(
        replace(each, attention=shipped.card(each.name, kernel).attention, memory=_ROOMY) for each in machine.devices
    )
    return replace(machine, devices=devices)
