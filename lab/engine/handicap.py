"""Ranks that sleep, to try unequal devices on equal ones."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel_backend import env
from parallel_backend.distributed.mesh import RankMesh
from parallel_backend.distributed.rank_speeds import clock, synchronize
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.state import State
from parallel_backend.loading.loaded_transformers import Transformers


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
        self._run, self._factor, self._device, self._clock = run, factor, device, clock(device)

    def __call__(self, state: State) -> State:
        """Run the blocks, then sleep."""
        synchronize(self._device)
        start = self._clock()
        result = self._run(state)
        synchronize(self._device)
        time.sleep((self._factor - 1) * (self._clock() - start))
        return result
