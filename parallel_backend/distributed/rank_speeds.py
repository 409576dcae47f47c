"""Relative speeds of the ranks, so that unequal devices get shares of the work that finish at the same time."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..layout.balance import MAX_SPEED
from ..progress import PROGRESS
from .device_memory import ran_out

_TRIES = 7
_WHILE = 0.2
"""Seconds: longer than the slices of time that programs get on one GPU, and enough to wake it."""
SAME_SPEED_RATIO = {"cuda": 1.15, "cpu": 1.6}
"""Ratio up to which two speeds count as equal, by device type.

Devices of one model differ by less, and the cut should be the same every time. The speed of a CPU core depends on what
runs beside it.
"""


def measure(device: torch.device, world_size: int) -> tuple[float, ...]:
    """Measure the relative speed of every rank; the fastest is 1. The same on all ranks; collective over the world."""
    return grouped(_of_all(1.0 / _shortest_seconds(device), world_size), SAME_SPEED_RATIO[device.type])


def paces(device: torch.device, world_size: int) -> tuple[float, ...]:
    """Return how often a second every rank computes something now, beside what else its device computes.

    A rank whose device has no room for that has 0. The same on all ranks; collective over the world.
    """
    try:
        pace = 1.0 / _usual_seconds(device)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        pace = 0.0  # not raised, since the other ranks wait
    return tuple(_of_all(pace, world_size))


def _of_all(speed: float, world_size: int) -> list[float]:
    speeds = [torch.zeros(1, dtype=torch.float64) for _ in range(world_size)]
    local = torch.tensor([speed], dtype=torch.float64)
    if world_size > 1:
        with PROGRESS.waiting():
            dist.all_gather(speeds, local)
    else:
        speeds = [local]
    return [float(speed) for speed in speeds]


def grouped(speeds: Sequence[float], ratio: float) -> tuple[float, ...]:
    """Return speeds relative to the fastest, with speeds that differ by at most ``ratio`` made equal."""
    levels: list[float] = []
    for speed in sorted(speeds, reverse=True):
        if not levels or levels[-1] > ratio * speed:
            levels.append(speed)
    nearest = (min(level for level in levels if level >= speed) / levels[0] for speed in speeds)
    return tuple(max(1 / MAX_SPEED, round(speed, 3)) for speed in nearest)


def _shortest_seconds(device: torch.device) -> float:
    """Return the shortest time of several runs of the same matrix multiplications, to exclude other load."""
    multiply = _multiplying(device, clock(device))
    times = [multiply() for _ in range(_TRIES)]
    return min(times[1:])  # the first run is a warm-up


def _usual_seconds(device: torch.device) -> float:
    """Return the median time of the same, in the second half of a while: a device that has rested is slow at first."""
    multiply, times, end = _multiplying(device, time.perf_counter), list[float](), time.perf_counter() + _WHILE
    while time.perf_counter() < end or len(times) < _TRIES:
        times.append(multiply())
    return statistics.median(times[len(times) // 2 :])


def _multiplying(device: torch.device, now: Callable[[], float]) -> Callable[[], float]:
    """Return what multiplies matrices, and returns the seconds.

    GPUs compute in float16, which is as fast as bfloat16 and not emulated on any of them.
    """
    size, dtype = (4096, torch.float16) if device.type == "cuda" else (512, torch.float32)
    ones = torch.ones(size, size, device=device, dtype=dtype)

    def multiply() -> float:
        matrix = ones
        synchronize(device)
        start = now()
        for _ in range(4):
            matrix = matrix @ ones / size
        synchronize(device)
        return now() - start

    return multiply


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds; on a CPU it counts only this thread's compute time."""
    return time.perf_counter if device.type == "cuda" else time.thread_time


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a device's current stream.

    Receives on other streams that nothing has waited for yet are not included.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
