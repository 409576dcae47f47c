"""The marker ``daily(n)``: which cases of a test run with everything else."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest


def mark_long(items: Sequence[pytest.Item], version_of: Callable[[Any], Hashable]) -> None:
    """Mark the cases as ``long`` that ``daily`` leaves out.

    Args:
        items: tests that have been collected.
        version_of: the ComfyUI of a test; each has its own cases.
    """
    cases: dict[tuple[Any, str, Hashable, int], list[Any]] = defaultdict(list)
    for item in items:
        mark = None if item.get_closest_marker("long") else item.get_closest_marker("daily")
        if mark:
            cases[item.parent, getattr(item, "originalname", ""), version_of(item), mark.args[0]].append(item)
    for (_, _, _, count), group in cases.items():
        daily = _chosen([_values(item) for item in group], count)
        for place, item in enumerate(group):
            if place not in daily:
                item.add_marker("long")


def _values(item: Any) -> frozenset[tuple[int, str]]:
    """Return the values of a case by place, as its name has them."""
    return frozenset(enumerate(item.callspec.id.split("-"))) if hasattr(item, "callspec") else frozenset()


def _chosen(cases: Sequence[frozenset[tuple[int, str]]], count: int) -> set[int]:
    """Return the places of cases that meet as many values as so many can, and else lie far apart."""
    met: set[tuple[int, str]] = set()
    chosen: list[int] = []
    for number in range(min(count, len(cases))):
        apart = number * len(cases) // count
        left = (place for place in range(len(cases)) if place not in chosen)
        chosen.append(min(left, key=lambda place: (-len(cases[place] - met), abs(place - apart))))
        met |= cases[chosen[-1]]
    return set(chosen)
