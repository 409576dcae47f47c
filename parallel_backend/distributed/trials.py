"""Which of two ways to compute the same is faster on this machine: they take turns until the ranks agree on one."""

import statistics
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .collectives import all_true
from .mesh import Axis
from .sent_bytes import SentBytes

TURNS = 12
"""Calls of each way. It is even, so that both come equally often."""
_WARM = 4
"""Of these, calls that do not count: memory is allocated in them."""
_GAIN = 0.98
"""The second way's share of the first way's time below which it is taken. Smaller gains may be noise."""
_BITS = 3
"""Amounts of work whose first bits are equal share a decision: not each length of text needs its own."""


class Trial:
    """Two ways that take turns. All ranks that go the same way call it equally often.

    Attributes:
        second: whether the second way is taken; None while both are tried.
    """

    def __init__(self) -> None:
        self._times: tuple[list[_Span], list[_Span]] = ([], [])
        self.second: bool | None = None

    @contextmanager
    def turn(self, device: torch.device, axis: Axis) -> Iterator[bool]:
        """Yield whether to try the second way. In the last turn, the ranks of the axis decide together."""
        # First, second, second, first: what alternates or drifts beside the ways counts for both alike.
        second = sum(map(len, self._times)) % 4 in (1, 2)
        span = _Span(device)
        yield second
        span.mark()
        self._times[second].append(span)
        if len(self._times[0]) == len(self._times[1]) == TURNS:
            first, other = (statistics.median(span.seconds() for span in spans[_WARM:]) for spans in self._times)
            self.second = all_true(other < _GAIN * first, axis)
            self._times = [], []


class Trials:
    """The trials of a mesh, by kind and amount of work. They do not keep its groups."""

    def __init__(self) -> None:
        self._trials = dict[Hashable, Trial]()

    def of(self, kind: Hashable, amount: int) -> Trial:
        """Return the trial of a call.

        Args:
            kind: equal for calls whose times can be compared.
            amount: proportional to the work of a call, such as its tokens.
        """
        bits = amount.bit_length()
        key = kind, bits, amount >> max(bits - _BITS, 0)
        if key not in self._trials:
            self._trials[key] = Trial()
        return self._trials[key]


@dataclass(frozen=True, kw_only=True)
class RowTrials:
    """The trials of one row of tokens.

    Attributes:
        trials: those of the mesh.
        axis: the ranks that hold the row. They decide together, because all of them exchange within a call.
        tokens: number of tokens of the row.
        kind: equal for rows whose times can be compared.
    """

    trials: Trials
    axis: Axis
    tokens: int
    kind: Hashable = ()

    def of(self, kind: Hashable, samples: int) -> Trial | None:
        """Return the trial of a call with so many samples; see ``Trials``.

        It is None while sent bytes are counted: that takes time, and a decision would be counted, too.
        """
        trial = self.trials.of((self.kind, kind), samples * self.tokens)
        return None if trial.second is None and SentBytes.counting else trial


class _Span:
    """A time on the host, or on a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Note the begin, and then the end."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> float:
        """Return the seconds between begin and end. Waits for a GPU."""
        begin, end = self._marks
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
