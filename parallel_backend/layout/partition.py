"""How a number of things is cut over ranks, computed alike on every rank with no communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Consecutive shards of ``sum(sizes)`` items; shard ``i`` belongs to the ``i``-th rank of an axis.

    Sizes may differ and may be zero: nothing needs to divide, and nothing is padded.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"a partition needs at least one shard and no negative size, not {self.sizes}")

    @classmethod
    def even(cls, total: int, parts: int) -> "Partition":
        """Cut ``total`` items as evenly as possible; the first ``total % parts`` shards hold one more."""
        base, extra = divmod(total, parts)
        return cls(tuple(base + (i < extra) for i in range(parts)))

    @classmethod
    def weighted(cls, total: int, weights: Sequence[float]) -> "Partition":
        """Cut ``total`` items in proportion to ``weights`` by largest remainder (Hamilton's method)."""
        if not weights or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"weights must be non-negative with a positive sum, not {tuple(weights)}")
        quotas = [total * weight / sum(weights) for weight in weights]
        sizes = [int(quota) for quota in quotas]
        by_remainder = sorted(range(len(weights)), key=lambda i: (sizes[i] - quotas[i], i))
        for i in by_remainder[: total - sum(sizes)]:
            sizes[i] += 1
        return cls(tuple(sizes))

    @property
    def total(self) -> int:
        """Number of items over all shards."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard starts."""
        return (0, *accumulate(self.sizes[:-1]))

    def slice(self, index: int) -> slice:
        """The items of shard ``index``."""
        start = self.offsets[index]
        return slice(start, start + self.sizes[index])
