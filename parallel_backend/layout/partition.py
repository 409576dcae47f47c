"""``Partition``: how items are split over ranks. Every rank computes the same one, without communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Consecutive shards of ``sum(sizes)`` items; shard ``i`` belongs to rank ``i`` of an axis.

    Sizes may differ and may be zero: the number of ranks need not divide the number of items. Nothing is padded.

    Raises:
        ValueError: there is no shard, or a size is negative.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"a partition needs at least one shard and no negative size, not {self.sizes}")

    @classmethod
    def even(cls, total: int, parts: int) -> "Partition":
        """Split ``total`` items as evenly as possible; the first ``total % parts`` shards hold one more."""
        base, extra = divmod(total, parts)
        return cls(tuple(base + (i < extra) for i in range(parts)))

    @classmethod
    def weighted(cls, total: int, weights: Sequence[float], *, least: int = 0) -> "Partition":
        """Split ``total`` items in proportion to ``weights`` by largest remainder (Hamilton's method).

        Args:
            least: number of items that each shard has at least. The largest shards give what others lack.

        Raises:
            ValueError: a weight is negative, their sum is not positive, or there are fewer items than that.
        """
        if not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"weights must be non-negative with a positive sum, not {tuple(weights)}")
        if total < least * len(weights):
            raise ValueError(f"{total} items are too few for {len(weights)} shards of at least {least}")
        quotas = [total * weight / sum(weights) for weight in weights]
        sizes = [int(quota) for quota in quotas]
        by_remainder = sorted(range(len(weights)), key=lambda i: (sizes[i] - quotas[i], i))
        for i in by_remainder[: total - sum(sizes)]:
            sizes[i] += 1
        while min(sizes) < least:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[sizes.index(min(sizes))] += 1
        return cls(tuple(sizes))

    @property
    def total(self) -> int:
        """Number of items in all shards."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index of each shard's first item."""
        return (0, *accumulate(self.sizes[:-1]))

    def slice(self, index: int) -> slice:
        """Return the range of shard ``index``."""
        start = self.offsets[index]
        return slice(start, start + self.sizes[index])
