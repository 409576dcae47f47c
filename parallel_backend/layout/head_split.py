"""``HeadSplit``: how Ulysses splits query heads over ranks, with the key heads that each rank needs for its own."""

import math
from dataclasses import dataclass
from functools import cache, cached_property

from .partition import Partition


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Query heads split over ranks. Successive query heads may share a key head, which two ranks may then need.

    Each layer of each step asks for the same, so it is computed once.

    Attributes:
        queries: the query heads of each rank.
        shared: number of query heads that share a key head.
    """

    queries: Partition
    shared: int

    @classmethod
    @cache
    def even(cls, heads: int, key_heads: int, ranks: int) -> "HeadSplit":
        """Split query heads as evenly as possible, whichever key heads they share. ``key_heads`` divides ``heads``."""
        return cls(queries=Partition.even(heads, ranks), shared=heads // max(key_heads, 1) or 1)

    def keys(self, rank: int) -> slice:
        """Return the range of key heads that a rank's query heads need."""
        queries = self.queries.slice(rank)
        last = -(-queries.stop // self.shared)
        return slice(queries.start // self.shared if self.queries.sizes[rank] else last, last)

    @cached_property
    def counts(self) -> tuple[tuple[int, int, int], ...]:
        """How many heads of q, k and v each rank needs."""
        keys = [self.keys(rank) for rank in range(len(self.queries.sizes))]
        lengths = [part.stop - part.start for part in keys]
        return tuple((size, length, length) for size, length in zip(self.queries.sizes, lengths, strict=True))

    @cached_property
    def repeats(self) -> tuple[list[int], ...]:
        """For each rank, how often each of its key heads stands in its keys and values.

        It is the least that gives each of them equally many query heads, as kernels need it. So it is once, unless the
        rank has only a part of the query heads of one key head, and more of another.
        """
        return tuple(self._repeats(rank) for rank in range(len(self.queries.sizes)))

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
