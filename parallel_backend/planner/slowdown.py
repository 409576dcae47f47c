"""Devices that compute slower, or faster, than when they were measured: by heat, or beside another program."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..distributed import rank_speeds
from ..distributed.collectives import agree
from ..distributed.mesh import Axis
from .balancing import equal_above
from .hardware.description import Curve, Device, Hardware

EVERY = 60.0
"""Seconds for which a measurement of the paces holds."""

Paces = tuple[float, ...]


class Watch:
    """Measures from time to time how fast each rank computes. All ranks of the world call the methods alike.

    Args:
        measure: measures the pace of every rank, in a fraction of a second. Collective.
        clock: returns seconds.
    """

    def __init__(
        self,
        measure: Callable[[torch.device, int], Paces] = rank_speeds.paces,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._clock = measure, clock
        self._paces: Paces = ()
        self._at = 0.0

    def note(self, paces: Paces) -> None:
        """Note paces that have just been measured."""
        self._paces, self._at = paces, self._clock()

    def speeds(self, hardware: Hardware, world: Axis, device: torch.device) -> Paces:
        """Return the speed of each device, relative to its own when the hardware was measured.

        Differences that measurements have anyway count as none, and where all devices have become slower alike, none
        has. So mostly all numbers are 1.
        """
        same = (1.0,) * world.size
        if len(hardware.paces) != world.size or world.size == 1:
            return same
        if agree(int(not self._paces or self._clock() - self._at > EVERY), world):
            self.note(self._measure(device, world.size))
            if relative(hardware, self._paces) != same:  # a GPU that has rested is slow at first
                self.note(self._measure(device, world.size))
        return relative(hardware, self._paces)


def relative(hardware: Hardware, paces: Sequence[float]) -> Paces:
    """Return the speed of each device relative to its own when it was measured: in tenths, 1 if about as fast."""
    ratios = [now / then for now, then in zip(paces, hardware.paces, strict=True)]
    speeds = [ratio / max(ratios) for ratio in ratios]
    return tuple(1.0 if speed > equal_above(hardware) else max(0.1, round(speed, 1)) for speed in speeds)


def as_now(hardware: Hardware, speeds: Sequence[float]) -> Hardware:
    """Return hardware whose devices compute at these speeds, relative to their own."""
    return replace(hardware, devices=tuple(map(_at, hardware.devices, speeds)))


def _at(device: Device, speed: float) -> Device:
    def slower(curve: Curve) -> Curve:
        return tuple((where, seconds / speed) for where, seconds in curve)

    return replace(
        device, matrix=device.matrix * speed, attention=device.attention * speed, layers=slower(device.layers),
        attends=slower(device.attends),
    )  # fmt: skip
