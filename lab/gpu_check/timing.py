"""Time and memory of work on a device."""

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 10


def device() -> torch.device:
    """Return the first GPU, or the CPU without one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(where: torch.device) -> None:
    """Wait until a device has finished its work."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def seconds(work: Callable[[], object], where: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median duration of some work, after two calls that are not timed."""
    durations = []
    for turn in range(2 + rounds):
        synchronize(where)
        started = time.perf_counter()
        work()
        synchronize(where)
        durations += [time.perf_counter() - started] if turn > 1 else []
    return statistics.median(durations)
