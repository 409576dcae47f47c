"""How fast the ranks are beside one another, for shares of the work that end together on unequal devices."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import InvalidRequest

T = TypeVar("T")

HANDICAP = "PARALLEL_DIT_HANDICAP"
"""Environment variable that slows a rank down, to try unequal devices on equal ones: ``1=2`` has rank 1 take twice as
long for all blocks, by sleeping."""

_TRIES = 7
_ALIKE = {"cuda": 1.15, "cpu": 1.6}
"""Ratio up to which speeds count as equal: devices of a kind differ by less, and cuts are to be the same each time.
A core's speed varies with what runs beside it."""


def measure(device: torch.device, rank: int, world_size: int) -> tuple[float, ...]:
    """The relative speed of every rank, the same on all of them; the fastest is 1. Collective over the world."""
    speeds = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    mine = torch.tensor([1.0 / (_seconds(device) * handicap(rank))], dtype=torch.float64)
    if world_size > 1:
        dist.all_gather(speeds, mine)
    else:
        speeds = [mine]
    return alike([float(speed) for speed in speeds], _ALIKE[device.type])


def alike(speeds: Sequence[float], ratio: float) -> tuple[float, ...]:
    """Speeds relative to the fastest; those that differ by no more than a ratio are equal."""
    levels: list[float] = []
    for speed in sorted(speeds, reverse=True):
        if not levels or levels[-1] > ratio * speed:
            levels.append(speed)
    return tuple(round(min(level for level in levels if level >= speed) / levels[0], 3) for speed in speeds)


def handicap(rank: int) -> float:
    """How many times as long a rank takes, by ``HANDICAP``.

    Raises:
        InvalidRequest: the variable cannot be read.
    """
    given = os.environ.get(HANDICAP, "")
    try:
        factors = {int(one): float(factor) for one, _, factor in (word.partition("=") for word in given.split())}
    except ValueError:
        factors = {0: 0.0}
    if any(factor < 1 for factor in factors.values()):
        raise InvalidRequest(f"{HANDICAP}={given}: write RANK=FACTOR with factors of at least 1, such as 1=2")
    return factors.get(rank, 1.0)


def slowed(run: Callable[[T], T], factor: float, device: torch.device) -> Callable[[T], T]:
    """The same, taking ``factor`` times as long as it computes; what it waits for does not count on a CPU."""
    clock = _clock(device)

    def slower(state: T) -> T:
        wait(device)
        start = clock()
        done = run(state)
        wait(device)
        time.sleep((factor - 1) * (clock() - start))
        return done

    return slower


def _seconds(device: torch.device) -> float:
    """The shortest time of some matrix multiplications, without what else runs on the device."""
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    matrix, taken, clock = torch.ones(size, size, device=device, dtype=dtype), [], _clock(device)
    for _ in range(_TRIES):
        wait(device)
        start = clock()
        for _ in range(4):
            matrix = matrix @ matrix / size
        wait(device)
        taken.append(clock() - start)
    return min(taken[1:])


def _clock(device: torch.device) -> Callable[[], float]:
    """On a CPU it counts what this thread computes, and not what it waits for."""
    return time.perf_counter if device.type == "cuda" else time.thread_time


def wait(device: torch.device) -> None:
    """Wait for what a device was given to compute; not for what it is to receive and nobody waits for yet."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
