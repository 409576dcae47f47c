"""The marker ``daily(n)`` and the option ``--cases N``: which cases of a test run with everything else."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest


def mark_long(items: Sequence[pytest.Item], version_of: Callable[[Any], Hashable], at_most: int | None = None) -> None:
    """Mark the cases as ``long`` that are left out.

    Args:
        items: tests that have been collected.
        version_of: the ComfyUI of a test; each has its own cases.
        at_most: cases of each test that stay, unless it is marked ``every_case``; None for what ``daily`` says alone.
    """
    cases: dict[tuple[Any, str, Hashable, int], list[Any]] = defaultdict(list)
    for item in items:
        other = any(item.get_closest_marker(name) for name in ("long", "grid"))  # runs at other times already
        count = None if other else _count(item, at_most)
        if count is not None:
            cases[item.parent, getattr(item, "originalname", ""), version_of(item), count].append(item)
    for (_, _, _, count), group in cases.items():
        daily = _chosen([_values(item) for item in group], count)
        for place, item in enumerate(group):
            if place not in daily:
                item.add_marker("long")


def _count(item: Any, at_most: int | None) -> int | None:
    """Return how many cases of a test stay; None for all."""
    daily = item.get_closest_marker("daily")
    counts = [daily.args[0]] if daily else []
    if at_most is not None and not item.get_closest_marker("every_case"):
        counts.append(at_most)
    return min(counts, default=None)


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
