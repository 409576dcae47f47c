"""Ranks that sleep, to try unequal devices on equal ones.

A slowed rank sleeps after each of its operators, on a GPU before each exchange, so that the others wait for it where
they would wait for a slow device: in every layer, and not only at the end of a step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend import env
from parallel_backend.distributed.mesh import RankMesh
from parallel_backend.distributed.rank_speeds import clock, synchronize
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.state import State
from parallel_backend.loading.loaded_transformers import Transformers

_LEAST = 1e-3
"""Seconds of sleep that come together, since shorter sleeps are inexact."""
_EXCHANGES = ("c10d", "_c10d_functional")


def handicap(rank: int) -> float:
    """Return the factor by which ``env.HANDICAP`` slows a rank down; 1 if it does not.

    Raises:
        InvalidRequest: the variable cannot be parsed, or a factor is below 1.
    """
    return env.HANDICAP.get().get(rank, 1.0)


def handicapped(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the speeds of ranks that ``env.HANDICAP`` slows down, relative to the fastest."""
    slowed = [speed / handicap(rank) for rank, speed in enumerate(speeds)]
    return tuple(round(speed / max(slowed), 3) for speed in slowed)


def slow_down(transformers: Transformers, device: torch.device) -> None:
    """Let the blocks of all transformers of a checkpoint take longer on the ranks that ``env.HANDICAP`` names."""
    get: Callable[..., Family] = transformers.get

    def slow_get(mesh: RankMesh, *arguments: Any, **options: Any) -> Family:
        family, factor = get(mesh, *arguments, **options), handicap(mesh.all_ranks.index)
        if factor > 1 and not isinstance(family.run, Slowed):
            family.run = Slowed(family.run, factor, device)
        return family

    vars(transformers)["get"] = slow_get


class Slowed:
    """``run`` slowed down to ``factor`` times its compute time; on a CPU, time spent waiting does not count."""

    def __init__(self, run: Callable[[State], State], factor: float, device: torch.device) -> None:
        self._run, self._factor, self._device = run, factor, device

    def __call__(self, state: State) -> State:
        """Run the blocks, with sleep."""
        with slowed(self._factor, self._device):
            return self._run(state)


@contextmanager
def slowed(factor: float, device: torch.device) -> Iterator[None]:
    """Take ``factor`` times as long for what is computed inside."""
    if factor <= 1:
        yield
        return
    with _Sleeps(factor, device) as sleeps:
        yield
        sleeps.catch_up()


class _Sleeps(TorchDispatchMode):
    """Sleeps for the time that work has taken since it slept last."""

    def __init__(self, factor: float, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._factor, self._device, self._clock = factor, device, clock(device)
        self._owed = 0.0
        synchronize(device)
        self._since = self._clock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exchanges = func.namespace in _EXCHANGES
        if exchanges:
            self.catch_up()
        result = func(*args, **(kwargs or {}))
        if self._device.type == "cpu" and not exchanges:
            self.catch_up(_LEAST)
        return result

    def catch_up(self, least: float = 0.0) -> None:
        """Sleep, unless it would be for less than ``least`` seconds. Later sleeps lack what one takes too long."""
        synchronize(self._device)
        now = self._clock()
        self._owed, self._since = self._owed + (self._factor - 1) * (now - self._since), now
        if self._owed > least:
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin
            self._since = self._clock()
