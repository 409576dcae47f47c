"""``HeadSplit``: how Ulysses splits query heads over ranks, with the key heads that each rank needs for its own."""

import math
from dataclasses import dataclass

from .partition import Partition


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Query heads split over ranks. Successive query heads may share a key head, which two ranks may then need.

    Attributes:
        queries: the query heads of each rank.
        shared: number of query heads that share a key head.
    """

    queries: Partition
    shared: int

    @classmethod
    def even(cls, heads: int, key_heads: int, ranks: int) -> "HeadSplit":
        """Split query heads as evenly as possible, whichever key heads they share. ``key_heads`` divides ``heads``."""
        return cls(queries=Partition.even(heads, ranks), shared=heads // max(key_heads, 1) or 1)

    def keys(self, rank: int) -> slice:
        """Return the range of key heads that a rank's query heads need."""
        queries = self.queries.slice(rank)
        last = -(-queries.stop // self.shared)
        return slice(queries.start // self.shared if self.queries.sizes[rank] else last, last)

    def counts(self, rank: int) -> tuple[int, int, int]:
        """Return how many heads of q, k and v a rank needs."""
        keys = self.keys(rank)
        return self.queries.sizes[rank], keys.stop - keys.start, keys.stop - keys.start

    def repeats(self, rank: int) -> list[int]:
        """Return how often each of a rank's key heads stands in its keys and values.

        It is the least that gives each of them equally many query heads, as kernels need it. So it is once, unless the
        rank has only a part of the query heads of one key head, and more of another.
        """
        queries, keys = self.queries.slice(rank), self.keys(rank)
        users = [
            min(queries.stop, (key + 1) * self.shared) - max(queries.start, key * self.shared)
            for key in range(keys.start, keys.stop)
        ]
        return [count // math.gcd(*users) for count in users]

    def local_keys(self, rank: int) -> int:
        """Return the number of heads of a rank's keys and values, with what is repeated."""
        return sum(self.repeats(rank))
