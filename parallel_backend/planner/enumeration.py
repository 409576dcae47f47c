"""Every layout that is valid for a prompt on some devices."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..engine.validation import is_refused
from ..errors import InvalidRequest
from ..layout.choice import auto
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from .balancing import by_memory, by_speed
from .hardware.description import Hardware
from .request import Prompt

_ALL_COUNTS = 16
"""Up to so many devices, layouts of each number of ranks are considered; beyond, only of numbers that divide it."""


def layouts(prompt: Prompt, hardware: Hardware, *, approximate: bool = False) -> list[ParallelLayout]:
    """Return every layout that works for a prompt, exact ones alone unless approximate ones are allowed.

    Where devices are unequal, each layout that can share by their speeds comes with equal shares and with such. Where
    one has no room for its part of the weights, the layout also comes with a smaller part for it.
    """
    found = []
    workload = prompt.plan(ParallelLayout()).workload(prompt.dtype.itemsize)
    for layout in _candidates(prompt, len(hardware.devices), approximate=approximate):
        if is_refused(layout, workload) or (prompt.compiled and layout.dsp > 1):
            continue
        shares = [each for each in (layout, by_speed(layout, hardware)) if each]
        if layout.shares_samples:  # which are whole, so that shares by speed may be equal, too
            by_samples = {Split.of(each).samples(prompt.samples): each for each in reversed(shares)}
            shares = [*reversed(by_samples.values())]
        for shared in filter(None, (*shares, *(by_memory(each, prompt, hardware) for each in shares))):
            if not is_refused(shared, workload):
                found.append(shared)
    return list(dict.fromkeys(found))


def of_the_rule(prompt: Prompt, hardware: Hardware) -> ParallelLayout:
    """Return the layout that the backend takes without a plan, where devices are roomy."""
    geometry = prompt.family.describe(prompt.model.config)
    rows = prompt.samples * prompt.extent.rows if geometry.within_frames and not prompt.compiled else 0
    return auto(hardware.host_sizes, branches=prompt.branches, rows=rows)


def _candidates(prompt: Prompt, devices: int, *, approximate: bool) -> Iterator[ParallelLayout]:
    counts = [n for n in range(1, devices + 1) if devices <= _ALL_COUNTS or devices % n == 0]
    for ranks in counts:
        for degrees in _degrees(ranks, prompt):
            yield from _variants(degrees, approximate=approximate)


def _degrees(ranks: int, prompt: Prompt) -> Iterator[dict[str, int]]:
    """Yield the degrees of all axes whose product is a number of ranks."""
    most = {"data": prompt.samples, "cfg": prompt.branches}
    axes = ("data", "cfg", "pipe", "ring", "ulysses", "dsp", "tensor")

    def grow(index: int, left: int, degrees: dict[str, int]) -> Iterator[dict[str, int]]:
        if index == len(axes):
            if left == 1:
                yield degrees
            return
        axis = axes[index]
        for degree in range(1, min(left, most.get(axis, left)) + 1):
            if left % degree == 0:
                yield from grow(index + 1, left // degree, {**degrees, axis: degree})

    return grow(0, ranks, {})


def _variants(degrees: Mapping[str, Any], *, approximate: bool) -> Iterator[ParallelLayout]:
    """Yield the layouts of these degrees: exact, with shared weights, and approximate if that is allowed."""
    try:
        layout = ParallelLayout(**degrees, patches=1 if degrees["pipe"] > 1 else 0)
    except InvalidRequest:
        return
    yield layout
    if layout.sequence > 1 and layout.pipe == 1:
        yield replace(layout, shard_weights=True)
    if approximate and layout.pipe > 1:
        yield replace(layout, patches=0)
    if approximate and layout.ring > 1 and layout.pipe == 1:
        yield replace(layout, stale="previous")
