"""Cutting the tokens of a row over the ranks of the sequence (``ring`` and ``ulysses`` together).

Every stream is cut by itself, so that text is shared out like image tokens. The ranks' shards in order are the
whole stream; what attention sees is all of rank 0's tokens, then all of rank 1's, in which order does not matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import all_gather, join
from ..geometry import IMAGE, Extent, Site, common
from ..layout import ParallelLayout
from ..mesh import Axis
from ..partition import Partition
from ..state import State
from .base import Job

_FLOAT32 = 4
"""Bytes of a guided prediction's value: guidance is applied in float32, as ComfyUI does."""


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """How the streams of a row are cut, and which shard this rank holds."""

    axis: Axis
    streams: Mapping[str, Partition]

    @classmethod
    def of(cls, lengths: Mapping[str, int], axis: Axis) -> "TokenSplit":
        """Cut streams of these lengths evenly over an axis."""
        return cls(axis=axis, streams={name: Partition.even(length, axis.size) for name, length in lengths.items()})

    def tokens(self, streams: Sequence[str]) -> Partition:
        """The tokens of several streams together, by rank."""
        return Partition(tuple(map(sum, zip(*(self.streams[name].sizes for name in streams), strict=True))))

    def masks(self, masks: Mapping[str, Tensor], streams: Sequence[str]) -> list[Tensor] | None:
        """By rank, which of its tokens of ``streams`` may be attended ``[B, tokens]``; None if all may be."""
        if not any(name in masks for name in streams):
            return None
        example = next(iter(masks.values()))
        whole = {
            name: masks.get(name, example.new_ones(1, part.total).expand(len(example), -1))
            for name, part in self.streams.items()
        }
        return [
            torch.cat([whole[name][:, self.streams[name].slice(rank)] for name in streams], dim=1)
            for rank in range(self.axis.size)
        ]

    def shard(self, state: State) -> State:
        """Keep this rank's tokens of every stream, and what is indexed by token with them."""
        if self.axis.size == 1:
            return state
        own = {name: part.slice(self.axis.index) for name, part in self.streams.items()}
        return State(
            streams={name: tokens[:, own[name]].contiguous() for name, tokens in state.streams.items()},
            tables={
                name: {key: table[:, own[name]].contiguous() for key, table in tables.items()}
                for name, tables in state.tables.items()
            },
            masks=state.masks,
            context=state.context,
        )

    def unshard(self, own: Tensor, stream: str) -> Tensor:
        """``[B, own tokens, ...]`` of every rank to ``[B, tokens, ...]`` on every rank."""
        shapes = [(own.shape[0], size, *own.shape[2:]) for size in self.streams[stream].sizes]
        return join(all_gather(own, shapes, self.axis), dim=1)


class SequenceSplit:
    """Shards the state after ``embed`` and gathers what ``head`` predicted."""

    axes = ("ring", "ulysses")

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """See ``Strategy.check``: any number of ranks works for any number of tokens."""

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """The guided prediction of the own tokens, once to each other rank of the sequence; where the branches have
        other numbers of tokens, each own branch's prediction before guidance."""
        if not job.guided:
            return 0
        place = layout.coordinates(rank)
        apart = common([extent for _, extent in job.branches]) is not None
        rows = list(job.own(layout, place)) if apart else [next(job.own(layout, {**place, "cfg": 0}))]
        values = 0
        for samples, extent in rows:
            own = Partition.even(extent.streams[IMAGE], layout.sequence).sizes[place["sequence"]]
            values += samples * own * extent.values
        return (layout.sequence - 1) * values * (job.itemsize if apart else _FLOAT32)


def site_tokens(layout: ParallelLayout, extent: Extent, site: Site) -> list[tuple[int, ...]]:
    """The tokens that attend at a site: by place on the ring, then by place on the ulysses axis."""
    parts = [Partition.even(extent.streams[name], layout.sequence).sizes for name in site.streams]
    tokens = [sum(sizes) for sizes in zip(*parts, strict=True)]
    return [tuple(tokens[i : i + layout.ulysses]) for i in range(0, len(tokens), layout.ulysses)]
