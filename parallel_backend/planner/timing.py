"""The usual seconds of some work: what a probe measures."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..distributed.collectives import lowest
from ..distributed.mesh import Axis
from ..progress import PROGRESS

T = TypeVar("T")

LEAST = 1e-9
"""Seconds, since a clock may not have moved."""
_ROUNDS, _ENOUGH = 3, 1.0
"""Rounds that count, and seconds after which fewer are enough."""
_WHILE = 0.2
"""Seconds until which there may be more rounds."""


def usual(work: Callable[[], object], world: Axis, *, most: int = _ROUNDS) -> float:
    """Return the median seconds of some rounds, which all ranks begin together.

    The fastest would be too good: in a step, all ranks wait for the one that is slowest just then.

    Args:
        most: rounds that count, if they take less than ``_WHILE`` together.
    """
    return usual_of(_without_result(work), world, most=most)[0]


def usual_of(work: Callable[[], T], world: Axis, *, most: int = _ROUNDS) -> tuple[float, T]:
    """Return the same as ``usual``, and what the last round returned."""
    taken, kept = list[float](), list[T]()
    while lowest(int(_too_few(taken, most)), world):
        taken.append(_once(work, kept))
    return _median(taken), kept[0]


def usual_here(work: Callable[[], T]) -> tuple[float, T]:
    """Return the same as ``usual_of``, of this rank alone."""
    taken, kept = list[float](), list[T]()
    while _too_few(taken, _ROUNDS):
        taken.append(_once(work, kept))
    return _median(taken), kept[0]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the median seconds of some rounds on this rank alone."""
    return usual_here(_without_result(work))[0]


def _too_few(taken: Sequence[float], most: int) -> bool:
    if len(taken) <= torch.cuda.is_available():
        return True
    spent = sum(_counted(taken))
    wanted = most if spent < _WHILE else _ROUNDS
    return spent < _ENOUGH and len(taken) <= wanted


def _counted(taken: Sequence[float]) -> Sequence[float]:
    """Leave out the first round, which also prepares: a GPU loads kernels. A CPU's counts where rounds are long.

    Any rank may end the rounds, so the only one that there is counts, too.
    """
    long = not torch.cuda.is_available() and len(taken) == 2 and sum(taken) >= _ENOUGH
    return taken if long or len(taken) == 1 else taken[1:]


def _median(taken: Sequence[float]) -> float:
    return max(statistics.median(_counted(taken)), LEAST)


def _once(work: Callable[[], T], kept: list[T]) -> float:
    """Return the seconds of a round, whose result replaces the one that is kept."""
    kept.clear()
    _wait()
    begin = time.perf_counter()
    kept.append(work())
    _wait()
    PROGRESS.tick()
    return time.perf_counter() - begin


def _without_result(work: Callable[[], object]) -> Callable[[], None]:
    """Return the work, which includes giving back the memory of its result."""

    def run() -> None:
        work()

    return run


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
