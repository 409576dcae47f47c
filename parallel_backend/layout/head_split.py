"""``HeadSplit``: how Ulysses splits query heads over ranks, with the key heads that each rank needs for its own."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

from .partition import Partition

_KEPT = 1024
"""Splits that are kept."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Successive ranks that hold equally many query heads.

    Attributes:
        ranks: how many they are.
        heads: the query heads that they hold together.
        taken: which of each rank's heads belong to the split.
        each: number of each rank's heads that belong to it.
    """

    ranks: int
    heads: slice
    taken: slice
    each: int


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Query heads split over ranks. Successive query heads may share a key head, which two ranks may then need.

    Each layer of each step asks for the same, so it is computed once.

    Attributes:
        queries: the query heads of each rank.
        shared: number of query heads that share a key head.
        half: which half of each rank's heads belongs to the split; None if all do.
    """

    queries: Partition
    shared: int
    half: int | None = None

    @classmethod
    def even(cls, heads: int, key_heads: int, ranks: int) -> "HeadSplit":
        """Split query heads as evenly as possible, whichever key heads they share. ``key_heads`` divides ``heads``."""
        return cls.weighted(heads, key_heads, (1.0,) * ranks)

    @classmethod
    @lru_cache(_KEPT)
    def weighted(cls, heads: int, key_heads: int, weights: tuple[float, ...]) -> "HeadSplit":
        """Split query heads in proportion to the ranks' weights."""
        return cls(queries=Partition.weighted(heads, weights), shared=heads // max(key_heads, 1) or 1)

    def keys(self, rank: int) -> slice:
        """Return the range of key heads that a rank's query heads need."""
        queries = self.queries.slice(rank)
        last = -(-queries.stop // self.shared)
        return slice(queries.start // self.shared if self.queries.sizes[rank] else last, last)

    @cached_property
    def halves(self) -> "list[HeadSplit]":
        """Two splits, each with half of every rank's heads, which share no key heads."""
        assert self.shared == 1
        return [replace(self, half=half) for half in range(2)]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of query heads of each rank."""
        return [taken.stop - taken.start for taken in map(self._taken, self.queries.sizes)]

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of ranks with equally many heads, without ranks that have none."""
        runs, first = list[Run](), 0
        for size, group in groupby(self.queries.sizes):
            ranks, taken = len(list(group)), self._taken(size)
            heads, each = slice(first, first + ranks * size), taken.stop - taken.start
            if each:
                runs.append(Run(ranks=ranks, heads=heads, taken=taken, each=each))
            first = heads.stop
        return runs

    def _taken(self, size: int) -> slice:
        return slice(0, size) if self.half is None else Partition.even(size, 2).slice(self.half)

    @cached_property
    def counts(self) -> list[tuple[int, int, int]]:
        """How many heads of q, k and v each rank needs."""
        if self.shared == 1:
            return [(size, size, size) for size in self.sizes]
        keys = [self.keys(rank) for rank in range(len(self.sizes))]
        return [(size, key.stop - key.start, key.stop - key.start) for size, key in zip(self.sizes, keys, strict=True)]

    @cached_property
    def repeats(self) -> list[list[int]]:
        """For each rank, how often each of its key heads stands in its keys and values.

        It is the least that gives each of them equally many query heads, as kernels need it. So it is once, unless the
        rank has only a part of the query heads of one key head, and more of another.
        """
        return [self._repeats(rank) for rank in range(len(self.queries.sizes))]

    def _repeats(self, rank: int) -> list[int]:
        queries, keys = self.queries.slice(rank), self.keys(rank)
        users = [
            min(queries.stop, (key + 1) * self.shared) - max(queries.start, key * self.shared)
            for key in range(keys.start, keys.stop)
        ]
        return [count // math.gcd(*users) for count in users]

    def local_keys(self, rank: int) -> int:
        """Return the number of heads of a rank's keys and values, with what is repeated."""
        return sum(self.repeats[rank])
