"""Devices that compute slower, or faster, than when they were measured: by heat, or beside another program."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from ..distributed import rank_speeds
from ..distributed.collectives import agree
from ..distributed.mesh import Axis
from .balancing import equal_above
from .hardware.description import Curve, Device, Hardware

EVERY = 60.0
"""Seconds for which a measurement of the paces holds."""
_STEADY = 0.1
"""By which part a pace may differ from the last one and is no other: otherwise plans would come and go."""

Paces = tuple[float, ...]


class Watch:
    """Measures from time to time how fast each rank computes. All ranks of the world call the methods alike.

    Args:
        measure: measures the pace of every rank, in a fraction of a second; 0 if it has no room for that. Collective.
        clock: returns seconds.
    """

    def __init__(
        self,
        measure: Callable[[torch.device, int], Paces] = rank_speeds.paces,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._clock = measure, clock
        self._paces: Paces = ()
        self._at: float | None = None
        self._asker: Hashable = None

    def note(self, paces: Paces) -> None:
        """Note paces that have just been measured; none if that did not work."""
        self._paces, self._at = paces or self._paces, self._clock()

    def speeds(self, hardware: Hardware, world: Axis, device: torch.device, asker: Hashable = None) -> Paces:
        """Return the speed of each device, relative to its own when the hardware was measured: mostly 1.

        Measures if it is time for it, but not while the same node of the same prompt asks. Collective over the world.
        """
        begins = asker is None or asker != self._asker
        self._asker = asker
        same = (1.0,) * world.size
        if len(hardware.paces) != world.size or world.size == 1:
            return same
        old = self._at is None or self._clock() - self._at > EVERY
        if agree(int(old and begins), world):
            self._look(hardware, world, device)
        return changes(hardware, self._paces) if self._paces else same

    def _look(self, hardware: Hardware, world: Axis, device: torch.device) -> None:
        found = self._measure(device, world.size)
        if all(found) and set(changes(hardware, found)) != {1.0}:  # something may have disturbed it
            found = tuple(map(max, found, self._measure(device, world.size)))
        if not all(found):
            return self.note(())
        before = self._paces or found
        self.note(
            tuple(then if abs(now / then - 1) <= _STEADY else now for now, then in zip(found, before, strict=True))
        )


def changes(hardware: Hardware, paces: Sequence[float]) -> Paces:
    """Return the speed of each device relative to its own when the hardware was measured, in tenths.

    Differences that measurements have anyway count as none, and where all devices have become slower alike, none has.
    """
    ratios = [now / then for now, then in zip(paces, hardware.paces, strict=True)]
    best, equal = max(ratios), equal_above(hardware)
    if min(ratios) > equal * best:
        return (1.0,) * len(ratios)
    return tuple(1.0 if equal < ratio < 1 / equal else max(0.1, round(ratio, 1)) for ratio in ratios)


def as_now(hardware: Hardware, speeds: Sequence[float]) -> Hardware:
    """Return hardware whose devices compute at these speeds, relative to their own."""
    return replace(hardware, devices=tuple(map(_at, hardware.devices, speeds)))


def _at(device: Device, speed: float) -> Device:
    def slower(curve: Curve) -> Curve:
        return tuple((where, seconds / speed) for where, seconds in curve)

    return replace(
        device, matrix=device.matrix * speed, attention=device.attention * speed, layers=slower(device.layers),
        attends=slower(device.attends), balanced=device.balanced * speed,
    )  # fmt: skip
