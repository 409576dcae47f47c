"""Time and traffic of a request on rank 0, for the log of requests."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ..progress import CLIENT, CONNECTING, LOADING, PREPARING
from ..protocol.rank_control import Finished

if TYPE_CHECKING:
    from torch import Tensor

_SHORT = {CLIENT: "client", CONNECTING: "connecting", LOADING: "loading", PREPARING: "preparing"}
"""Names in the log of phases that have longer ones; of all others it is the first word."""


class Account:
    """Seconds by phase, and bytes of tensors sent to the client, of one request."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._sent = self._received = self._steps = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time in which the context lasts."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - start

    def add_phases(self, seconds: Mapping[str, float]) -> None:
        """Add what ``ProgressCounter.spent`` returns."""
        for phase, spent in seconds.items():
            self._seconds[_SHORT.get(phase) or phase.partition(" ")[0]] += spent

    def count_received(self, tensors: "Mapping[str, Tensor]") -> None:
        """Count tensors that have arrived."""
        self._received += sum(tensor.nbytes for tensor in tensors.values())

    def count(self, tensors: "Mapping[str, Tensor]") -> None:
        """Count tensors that were sent."""
        self._sent += sum(tensor.nbytes for tensor in tensors.values())

    def count_step(self, results: "Mapping[str, Tensor]") -> None:
        """Count a step whose results were sent."""
        self._steps += 1
        self.count(results)

    def added_to(self, finished: Finished) -> Finished:
        """Return a report with this account added."""
        return msgspec.structs.replace(
            finished, seconds=dict(self._seconds), sent=self._sent, received=self._received, steps=self._steps
        )
