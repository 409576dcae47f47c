"""The marker ``daily(n)``: which cases of a test run with everything else."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest


def mark_long(items: Sequence[pytest.Item], version_of: Callable[[Any], Hashable]) -> None:
    """Mark the cases as ``long`` that ``daily`` leaves out. The others lie at even distances, from the first one on.

    Args:
        items: tests that have been collected.
        version_of: the ComfyUI of a test; each has its own cases.
    """
    cases: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = None if item.get_closest_marker("long") else item.get_closest_marker("daily")
        if mark:
            cases[item.parent, getattr(item, "originalname", ""), version_of(item), mark.args[0]].append(item)
    for (*_, count), group in cases.items():
        daily = {place * len(group) // count for place in range(count)}
        for place, item in enumerate(group):
            if place not in daily:
                item.add_marker("long")
