"""Shares for devices of unequal speed: the ``balance`` of a layout on some machine."""

from collections.abc import Callable
from dataclasses import replace

from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from .compute import interpolated
from .hardware.description import Device, Hardware

_EQUAL, _EQUAL_CORES = 0.85, 0.62
"""Relative speeds above this count as equal: measurements vary by as much, and on CPU cores by more."""

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


def equal_above(hardware: Hardware) -> float:
    """Return the relative speed above which a device of this hardware counts as fast as the fastest."""
    return _EQUAL_CORES if hardware.cores else _EQUAL


def _relative(layout: ParallelLayout, hardware: Hardware, speed: Speed) -> tuple[float, ...]:
    """Return the speeds of the ranks of a group that shares a row. Of several groups, the slowest counts."""
    slowest = [float("inf")] * layout.shares_row
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        index = place["sequence"] * layout.tensor + place["tensor"]
        slowest[index] = min(slowest[index], speed(hardware.devices[rank]))
    return tuple(round(each / max(slowest), 2) for each in slowest)


def _layers(device: Device) -> float:
    return 1 / interpolated(device.layers, 1.0) if device.layers else device.matrix


def _attention(device: Device) -> float:
    if not device.attends:
        return device.attention
    operations, seconds = max(device.attends)
    return operations / seconds
