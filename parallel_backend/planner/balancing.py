"""Shares for devices of unequal speed or memory: the ``balance`` of a layout on some machine."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean

from ..distributed.rank_speeds import grouped
from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..loading.offload_plan import with_slack
from .compute import interpolated
from .hardware.description import Device, Hardware
from .memory import stages, work_bytes
from .request import Prompt

_EQUAL, _EQUAL_CORES = 0.85, 0.62
"""Relative speeds above this count as equal: measurements vary by as much, and on CPU cores by more."""

_ROUNDED = 1 + 1e-9
"""By what a share may seem to exceed its limit."""
_FILLED = 0.95
"""How much of what a device has room for the planner gives it: heads are shared whole."""

_ROUNDS = 8
"""After so many, shares hardly change."""

Speed = Callable[[Device], float]


def by_speed(layout: ParallelLayout, hardware: Hardware) -> ParallelLayout | None:
    """Return an exact layout with shares by its devices' speeds; None where equal shares are as good.

    Layers and attention get speeds of their own where a layout can share heads apart from tokens.
    """
    if layout.shares_samples:
        speeds = _levelled(_relative(layout, hardware, _layers), hardware)
        with suppress(InvalidRequest):  # speeds too far apart
            return replace(layout, balance=speeds) if min(speeds) < 1 else None
        return None
    if layout.shares_row == 1 or layout.adapts:
        return None
    layers, attention = (_relative(layout, hardware, speed) for speed in (_layers, _attention))
    for attends in (attention if attention != layers else (), ()):
        if min(*layers, *attends) > equal_above(hardware):
            continue
        tokens, heads = _at_their_shares(layout, hardware, layers), _levelled(attends, hardware)
        try:
            shared = replace(layout, balance=tokens, attention_balance=heads)
        except InvalidRequest:  # speeds too far apart, or no heads to share
            continue
        return shared if min(*tokens, *heads) < 1 else None
    return None


def shares_of_rows(hardware: Hardware, ranks: int) -> ParallelLayout:
    """Return the layout in which ranks share the rows of what a VAE codes: by their speeds if these differ."""
    even = ParallelLayout(ring=ranks)
    return by_speed(even, hardware) or even


def by_memory(layout: ParallelLayout, prompt: Prompt, hardware: Hardware) -> ParallelLayout | None:
    """Return a layout that cuts weights with smaller shares for devices that have no room for their own.

    What these have no room for, the others share in proportion to their own shares.

    Returns:
        None where all have room, where all of them together have too little, and for layouts that cut no weights, or
        that cut both weights and tokens, but for stages.
    """
    sizes = prompt.sizes
    if layout.pipe == 1 and (layout.tensor == 1 or layout.sequence > 1):
        return None
    layout = adapted(layout, hardware)
    beside, blocks = sizes.outside + with_slack(max(work_bytes(prompt, layout))), sum(sizes.blocks)
    limits = [_FILLED * (each - beside) / blocks for each in _least(layout, hardware, lambda device, _: device.memory)]
    split = Split.of(layout)
    shares = list(map(split.cut_share, range(layout.tensor)))
    if layout.pipe > 1:
        shares = [stage / blocks for stage in stages(sizes, split.stages)]
    if min(limits) <= 0 or sum(limits) <= 1 or not _exceeding(shares, limits):
        return None
    within = _within(shares, limits)
    try:
        return replace(layout, balance=tuple(round(each / max(within), 3) for each in within), attention_balance=())
    except InvalidRequest:  # shares too far apart
        return None


def adapted(layout: ParallelLayout, hardware: Hardware) -> ParallelLayout:
    """Return a layout as the ranks run it: they cut stages and stale patches by their speeds if these are unlike."""
    speeds = [_layers(device) for device in hardware.devices[: layout.ranks]]
    return layout.at(grouped(speeds, 1 / equal_above(hardware))) if layout.adapts else layout


def equal_above(hardware: Hardware) -> float:
    """Return the relative speed above which a device of this hardware counts as fast as the fastest."""
    return _EQUAL_CORES if hardware.cores else _EQUAL


def _relative(layout: ParallelLayout, hardware: Hardware, speed: Speed) -> tuple[float, ...]:
    """Return the speeds of the ranks of a group that shares a row, or samples. Of several, the slowest counts."""
    speeds = _least(layout, hardware, lambda device, _: speed(device))
    return tuple(each / max(speeds) for each in speeds)


def _at_their_shares(layout: ParallelLayout, hardware: Hardware, speeds: tuple[float, ...]) -> tuple[float, ...]:
    """Return speeds with whose shares all take equally long.

    What each rank does whatever its share is makes a small share slower than in proportion.
    """
    if all(device.balanced for device in hardware.devices[: layout.ranks]):
        return _levelled(_least(layout, hardware, lambda device, _: device.balanced), hardware)
    rates: list[float] = list(speeds)
    for _ in range(_ROUNDS):
        shares = [rate / sum(rates) for rate in rates]
        rates = _least(layout, hardware, partial(_rate_of, shares))
    return _levelled(rates, hardware)


def _levelled(speeds: Sequence[float], hardware: Hardware) -> tuple[float, ...]:
    """Return speeds relative to the fastest. Those that count as equal are their mean, since they differ by chance."""
    if not speeds:
        return ()
    levels = grouped(speeds, 1 / equal_above(hardware))
    means = {level: fmean(speed for speed, own in zip(speeds, levels, strict=True) if own == level) for level in levels}
    return tuple(round(means[level] / max(means.values()), 2) for level in levels)


def _least(layout: ParallelLayout, hardware: Hardware, value: Callable[[Device, int], float]) -> list[float]:
    """Return the least value of the devices at each place of a group that shares a row or samples, or of each stage."""
    axis = "pipe" if layout.pipe > 1 else "data" if layout.shares_samples else ""
    counts = {"pipe": layout.pipe, "data": layout.data, "": layout.shares_row}
    least = [float("inf")] * counts[axis]
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        index = place[axis] if axis else place["sequence"] * layout.tensor + place["tensor"]
        least[index] = min(least[index], value(hardware.devices[rank], index))
    return least


def _exceeding(shares: Sequence[float], limits: Sequence[float]) -> set[int]:
    return {place for place, share in enumerate(shares) if share > limits[place] * _ROUNDED}


def _within(shares: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return shares of 1 that exceed no limit. Limits add up to more than 1."""
    full, within = set[int](), list(shares)
    while over := _exceeding(within, limits):
        full |= over
        left = 1 - sum(limits[place] for place in full)
        others = sum(share for place, share in enumerate(within) if place not in full)
        within = [limits[place] if place in full else share * left / others for place, share in enumerate(within)]
    return within


def _layers(device: Device) -> float:
    return _rate(device, 1.0)


def _rate_of(shares: Sequence[float], device: Device, place: int) -> float:
    return _rate(device, shares[place])


def _rate(device: Device, share: float) -> float:
    return share / interpolated(device.layers, share) if device.layers else device.matrix


def _attention(device: Device) -> float:
    if not device.attends:
        return device.attention
    operations, seconds = max(device.attends)
    return operations / seconds
