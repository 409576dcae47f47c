"""Shares for devices of unequal speed or memory: the ``balance`` of a layout on some machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..loading.offload_plan import with_slack
from .compute import interpolated
from .hardware.description import Device, Hardware
from .memory import work_bytes
from .request import Prompt

_EQUAL, _EQUAL_CORES = 0.85, 0.62
"""Relative speeds above this count as equal: measurements vary by as much, and on CPU cores by more."""

_ROUNDED = 1 + 1e-9
"""By what a share may seem to exceed its limit."""
_FILLED = 0.95
"""How much of what a device has room for the planner gives it: heads are shared whole."""

Speed = Callable[[Device], float]


def by_speed(layout: ParallelLayout, hardware: Hardware) -> ParallelLayout | None:
    """Return an exact layout with shares by its devices' speeds; None where equal shares are as good.

    Layers and attention get speeds of their own where a layout can share heads apart from tokens.
    """
    if layout.shares_row == 1 or layout.adapts:
        return None
    layers, attention = (_relative(layout, hardware, speed) for speed in (_layers, _attention))
    for attends in (attention if attention != layers else (), ()):
        if min(*layers, *attends) > equal_above(hardware):
            continue
        try:
            return replace(layout, balance=layers, attention_balance=attends)
        except InvalidRequest:  # speeds too far apart, or no heads to share
            continue
    return None


def by_memory(layout: ParallelLayout, prompt: Prompt, hardware: Hardware) -> ParallelLayout | None:
    """Return a layout that cuts weights with smaller shares for devices that have no room for their own.

    What these have no room for, the others share in proportion to their own shares.

    Returns:
        None where all have room, where all of them together have too little, and for layouts that are not ``tensor``
        alone, or with ``cfg`` and ``data``.
    """
    sizes = prompt.sizes
    if layout.tensor == 1 or layout.sequence > 1 or layout.pipe > 1:
        return None
    beside, blocks = sizes.outside + with_slack(max(work_bytes(prompt, layout))), sum(sizes.blocks)
    limits = [_FILLED * (each - beside) / blocks for each in _least(layout, hardware, lambda device: device.memory)]
    shares = list(map(Split.of(layout).cut_share, range(layout.tensor)))
    if min(limits) <= 0 or sum(limits) <= 1 or not _exceeding(shares, limits):
        return None
    within = _within(shares, limits)
    try:
        return replace(layout, balance=tuple(round(each / max(within), 3) for each in within), attention_balance=())
    except InvalidRequest:  # shares too far apart
        return None


def equal_above(hardware: Hardware) -> float:
    """Return the relative speed above which a device of this hardware counts as fast as the fastest."""
    return _EQUAL_CORES if hardware.cores else _EQUAL


def _relative(layout: ParallelLayout, hardware: Hardware, speed: Speed) -> tuple[float, ...]:
    """Return the speeds of the ranks of a group that shares a row. Of several groups, the slowest counts."""
    slowest = _least(layout, hardware, speed)
    return tuple(round(each / max(slowest), 2) for each in slowest)


def _least(layout: ParallelLayout, hardware: Hardware, value: Callable[[Device], float]) -> list[float]:
    """Return the least value of the devices at each place of a group that shares a row."""
    least = [float("inf")] * layout.shares_row
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        index = place["sequence"] * layout.tensor + place["tensor"]
        least[index] = min(least[index], value(hardware.devices[rank]))
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
    return 1 / interpolated(device.layers, 1.0) if device.layers else device.matrix


def _attention(device: Device) -> float:
    if not device.attends:
        return device.attention
    operations, seconds = max(device.attends)
    return operations / seconds
