"""Steps of a run in several layouts, until the fastest is known. Each step counts: all layouts are exact."""

import math
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..distributed.collectives import agree
from ..distributed.mesh import Axis
from ..layout.parallel_layout import ParallelLayout

CALLS = 3
"""Steps in each layout. The first one loads what is missing and makes process groups, and is not timed."""
_GAIN = 0.97
"""A layout has to take at most this part of the first one's time to be taken instead: less is not certain."""

Seconds = Mapping[ParallelLayout, float]


class Notes(Protocol):
    """Keeps what comes of trials. All ranks call it alike."""

    def note(self, seconds: Seconds, trying: ParallelLayout | None) -> None:
        """Note the seconds that are known, and the layout whose first step comes next and may end the ranks."""

    def settle(self, layout: ParallelLayout, seconds: Seconds) -> str:
        """Note the layout to take, and the seconds in each that works. Returns why, of which rank 0's is right."""


def fastest(first: ParallelLayout, seconds: Mapping[ParallelLayout, float]) -> ParallelLayout:
    """Return the layout to take by the seconds of a step, of which ``first`` is the expected best."""
    best = min(seconds, key=lambda each: seconds[each])
    return best if seconds[best] <= _GAIN * seconds[first] else first


class LayoutTrial:
    """Which layout the next step of one run runs in. Every rank has the same one, and calls the methods alike.

    Args:
        layouts: to be tried, the expected best first. The run begins in it.
        seconds: of a step in each layout on this rank, of this run and of earlier ones that computed the same; infinite
            where a layout does not work.
        notes: told what comes of it.

    Attributes:
        layout: of the next step.
        settled: whether it stays.
        reason: why, in a sentence, once it stays.
    """

    def __init__(
        self, layouts: Sequence[ParallelLayout], seconds: MutableMapping[ParallelLayout, float], notes: Notes
    ) -> None:
        self._layouts, self._seconds, self._notes = layouts, seconds, notes
        self._calls, self._unsure = 0, False
        self.layout, self.settled, self.reason = layouts[0], False, ""

    @property
    def due(self) -> bool:
        """Whether the next step may run in another layout."""
        return not self.settled and self.layout in self._seconds and self._calls in (0, CALLS)

    def move(self, world: Axis) -> ParallelLayout:
        """Go on to the next layout that is not known, or else to the fastest, and return it. Collective."""
        unknown = next((each for each in self._layouts if each not in self._seconds), None)
        self.layout, self._calls = unknown or self._settled(world), 0
        if unknown:
            self._unsure = True
            self._notes.note(self._known, unknown)
        return self.layout

    def fails(self) -> None:
        """Note that the layout does not work."""
        self._seconds[self.layout] = math.inf
        self._works()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a step, which counts even if it fails: on other ranks it may not."""
        begin = time.perf_counter()
        try:
            yield
            self._works()
        finally:
            self._calls += 1
            if 1 < self._calls <= CALLS:
                taken = time.perf_counter() - begin
                self._seconds[self.layout] = min(taken, self._seconds.get(self.layout, math.inf))

    def _works(self) -> None:
        """Take back that the layout may end the ranks."""
        if self._unsure:
            self._unsure = False
            self._notes.note(self._known, None)

    @property
    def _known(self) -> dict[ParallelLayout, float]:
        return {each: self._seconds[each] for each in self._layouts if self._seconds.get(each, math.inf) < math.inf}

    def _settled(self, world: Axis) -> ParallelLayout:
        known = self._known
        place = agree(self._layouts.index(fastest(self._layouts[0], known)), world)
        self.settled, self.reason = True, self._notes.settle(self._layouts[place], known)
        return self._layouts[place]
