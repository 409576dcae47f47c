"""How many equal pieces of work each rank takes at a time, by its speed."""

from collections.abc import Sequence

_LONGEST = 4
"""Most pieces of a round, in ranks: progress and cancels wait for the end of a round."""


def rounds(count: int, speeds: Sequence[float]) -> list[tuple[int, ...]]:
    """Return how many of some pieces each rank takes in each round, so that ranks wait little for each other.

    With equal speeds, each rank takes one a round. A rank that would make the others wait takes none.

    Args:
        count: number of pieces.
        speeds: of the ranks, relative to each other.
    """
    sizes = range(len(speeds), _LONGEST * len(speeds) + 1)
    size = min(sizes, key=lambda each: _seconds(_taken(each, speeds), speeds) / each)
    return [_taken(min(size, count - first), speeds) for first in range(0, count, size)]


def _taken(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the pieces of each rank in one round: each goes to the rank that ends it first."""
    taken = [0] * len(speeds)
    for _ in range(count):
        first = min(range(len(speeds)), key=lambda rank: (taken[rank] + 1) / speeds[rank])
        taken[first] += 1
    return tuple(taken)


def _seconds(taken: Sequence[int], speeds: Sequence[float]) -> float:
    return max(pieces / speed for pieces, speed in zip(taken, speeds, strict=True))
