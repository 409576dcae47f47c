"""When the ranks ask whether to go on: by time, since each time they wait for the GPU and for each other."""

import time
from collections.abc import Callable

import torch

from ..distributed import rank_speeds
from ..distributed.collectives import agree
from ..distributed.mesh import Axis

INTERVAL = 0.1
"""Seconds of work after which the ranks ask again."""
_GROWTH = 4
"""Parts for each part before, at most: the parts of a decode differ about 16 times in length, short ones first."""


class Pace:
    """How many parts of the work the ranks do until they ask rank 0 again, which measures how long they take.

    Args:
        axis: the ranks that take part.
        device: what rank 0 waits for before it asks; None if the work itself keeps up with its device.
        cancelled: whether the request was cancelled, on rank 0.
        interval: seconds of work after which the ranks ask again; 0 for after each part.
    """

    def __init__(
        self, axis: Axis, device: torch.device | None, cancelled: Callable[[], bool], interval: float = INTERVAL
    ) -> None:
        self._axis, self._device, self._cancelled, self._interval = axis, device, cancelled, interval
        self._parts = self._left = 1
        self._began = time.perf_counter()

    def part_done(self) -> bool:
        """Count a part; return whether the ranks have to ask now."""
        self._left -= 1
        return not self._left

    def go_on(self) -> bool:
        """Ask whether to go on. Collective over the axis; all ranks get the same answer."""
        self._parts = self._left = agree(0 if self._axis.index else self._next(), self._axis)
        return self._parts > 0

    def _next(self) -> int:
        """Return how many parts follow; 0 to stop."""
        if self._device:
            rank_speeds.synchronize(self._device)  # else the host queues parts ahead, and a cancel takes effect late
        if self._cancelled():
            return 0
        now = time.perf_counter()
        seconds, self._began = max(now - self._began, 1e-6) / self._parts, now
        return max(1, min(_GROWTH * self._parts, int(self._interval / seconds)))
