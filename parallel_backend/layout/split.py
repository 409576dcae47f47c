"""``Split``: how the ranks of a layout share a request's work. The one place that decides it.

What computes, the formulas of bytes and of memory, and reports all ask the same object, so they cannot differ. Every
rank makes the same one from the layout, without communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .head_split import HeadSplit
from .parallel_layout import ParallelLayout
from .partition import Partition
from .speeds import AxisWeights, by_rank, weights_of
from .stream_partition import StreamPartition

_LESS = 0.99
"""What counts as less than an even share."""
_KEPT = 256
"""Splits that are kept. Layouts come from requests, so there could be any number."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shares of all ranks, in proportion to the speeds that the layout gives, and otherwise equal.

    Attributes:
        layout: whose ranks share.
    """

    layout: ParallelLayout

    @classmethod
    @lru_cache(_KEPT)
    def of(cls, layout: ParallelLayout) -> "Split":
        """Return the split of a layout. It is the same object for the same layout."""
        return cls(layout=layout)

    @cached_property
    def weights(self) -> AxisWeights:
        """By what the ranks along each axis share."""
        return weights_of(self.layout)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each rank; 1 for each if the layout gives none."""
        return by_rank(self.layout)

    @property
    def stages(self) -> tuple[float, ...]:
        """Relative speeds of the stages of ``pipe``, by which the blocks are cut."""
        return self.layout.balance if self.layout.pipe > 1 and self.layout.balance else (1.0,) * self.layout.pipe

    def branches(self, count: int) -> Partition:
        """Split branches of guidance, by place on ``cfg``."""
        return Partition.even(count, self.layout.cfg)

    def samples(self, count: int) -> Partition:
        """Split samples, by place on ``data``. The first place gets one at least: rank 0 shows what it computes."""
        sizes = [*Partition.weighted(count, self.weights.samples).sizes]
        if count and not sizes[0]:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[0] = 1
        return Partition(tuple(sizes))

    def tokens(self, count: int) -> Partition:
        """Split tokens, or other items of a row that are computed alike, by place in the sequence."""
        return Partition.weighted(count, self.weights.tokens)

    def streams(self, lengths: Mapping[str, int]) -> dict[str, StreamPartition]:
        """Split whole streams of these lengths, by place in the sequence."""
        return {name: StreamPartition(((0, self.tokens(length)),)) for name, length in lengths.items()}

    def heads(self, heads: int, key_heads: int) -> HeadSplit:
        """Split the heads that a rank has outside of its attention, by place on ``ulysses``."""
        return HeadSplit.weighted(heads, key_heads, self.weights.heads)

    def frames(self, count: int) -> Partition:
        """Split frames that attend only to themselves, by place on ``dsp``."""
        return Partition.weighted(count, self.weights.frames)

    def columns(self, units: int) -> Partition:
        """Split units of linear layers that are no heads, by place on ``tensor``. Each gets at least one, if it can."""
        return Partition.weighted(units, self.weights.columns, least=int(units >= self.layout.tensor))

    def cut_heads(self, groups: int) -> Partition:
        """Split groups of heads with their layers, by place on ``tensor``. Each gets at least one, if it can."""
        return Partition.weighted(groups, self.weights.cut_heads, least=int(groups >= self.layout.tensor))

    def cut_share(self, place: int) -> float:
        """Return the share of the layers at a place on ``tensor``."""
        return self.weights.columns[place] / sum(self.weights.columns)

    def rows(self, height: int, ranks: int) -> Partition:
        """Split the rows of a picture over the first ``ranks`` ranks. Each gets at least one, if it can."""
        return Partition.weighted(height, self.speeds[:ranks], least=int(height >= ranks))

    @cached_property
    def note(self) -> str:
        """Which ranks get less than an even share of their row, or of the samples, for people.

        It is "" if none does, or if they are stages.
        """
        if self.layout.pipe > 1:
            return ""
        even = 1 / (self.layout.data if self.layout.shares_samples else self.layout.shares_row)
        less = dict[str, list[str]]()
        for rank in range(self.layout.ranks):
            share = self._share(self.layout.coordinates(rank))
            if share < _LESS * even:
                less.setdefault(f"{share:.0%}", []).append(str(rank))
        parts = [f"rank{'s' * (len(ranks) > 1)} {' and '.join(ranks)}: {share}" for share, ranks in less.items()]
        return f"less than an even share of {even:.0%} for {', '.join(parts)}, by balance" if parts else ""

    def _share(self, place: Mapping[str, int]) -> float:
        """Return the share of a row at a place, or of the samples."""
        if self.layout.shares_samples:
            return self.weights.samples[place["data"]] / sum(self.weights.samples)
        return self.weights.tokens[place["sequence"]] / sum(self.weights.tokens) * self.cut_share(place["tensor"])
