"""Splitting the tokens of a row over the ranks of the sequence (``ring``, ``ulysses`` and ``dsp`` together).

Every stream is split separately, so text is split like image tokens. Attention sees all of rank 0's tokens, then all of
rank 1's, and so on; the order of keys does not matter.

A stream may stay whole on every rank inside the blocks (``Extent.whole``). It is split before ``head`` alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributed.collectives import all_gather, concat
from ..distributed.mesh import Axis
from ..interfaces.state import State
from ..layout.partition import Partition
from ..layout.stream_partition import StreamPartition


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """How the streams of a row are split over the ranks of an axis.

    Attributes:
        axis: the ranks; ``axis.index`` is this rank's share.
        streams: the split of each stream, by name.
        whole: names of the streams that every rank holds whole inside the blocks.
    """

    axis: Axis
    streams: Mapping[str, StreamPartition]
    whole: frozenset[str] = frozenset()

    @classmethod
    def even(cls, lengths: Mapping[str, int], axis: Axis, whole: Collection[str] = ()) -> "TokenSplit":
        """Split whole streams of these lengths evenly over an axis."""
        streams = {name: StreamPartition.even(0, length, axis.size) for name, length in lengths.items()}
        return cls(axis=axis, streams=streams, whole=frozenset(whole))

    def held(self, stream: str) -> int:
        """Return the number of tokens of a stream that this rank holds inside the blocks."""
        shares = self.streams[stream]
        return shares.total if stream in self.whole else shares.sizes[self.axis.index]

    def tokens(self, streams: Sequence[str]) -> Partition:
        """Return the number of tokens of several streams together, by rank."""
        return Partition(tuple(map(sum, zip(*(self.streams[name].sizes for name in streams), strict=True))))

    def masks(self, masks: Mapping[str, Tensor], streams: Sequence[str]) -> list[Tensor] | None:
        """Split masks over the ranks.

        Args:
            masks: for streams with masked tokens, which tokens ``[B, tokens]`` (bool) may be attended to.
            streams: the streams of the attention, in the order in which it joins them.

        Returns:
            For each rank, which of its tokens ``[B, local tokens]`` may be attended to; None if no stream has a mask.
        """
        if not any(name in masks for name in streams):
            return None
        example = next(iter(masks.values()))
        ones = {name: example.new_ones(len(example), shares.total) for name, shares in self.streams.items()}
        return [
            torch.cat(
                [masks[name][:, part] if name in masks else ones[name][:, : part.stop - part.start]
                 for name in streams for part in self.streams[name].of(rank)],
                dim=1,
            )
            for rank in range(self.axis.size)
        ]  # fmt: skip

    def shard(self, state: State) -> State:
        """Return the state with what this rank holds of every stream inside the blocks, and the tables' entries."""
        return self._cut(state, self.streams.keys() - self.whole)

    def shard_whole(self, state: State) -> State:
        """Return the state after the blocks with only this rank's share of the streams that are whole inside them."""
        return self._cut(state, self.whole) if self.whole else state

    def _cut(self, state: State, names: Collection[str]) -> State:
        local = {name: self.streams[name].of(self.axis.index) for name in names}
        return replace(
            state,
            streams={name: _taken(tokens, local.get(name)) for name, tokens in state.streams.items()},
            tables={
                name: {key: _taken(table, local.get(name)) for key, table in tables.items()}
                for name, tables in state.tables.items()
            },
        )

    def predicted(self, streams: Sequence[str]) -> tuple[int, ...]:
        """Return the number of tokens of several streams that each rank predicts."""
        return self.tokens(streams).sizes

    def unshard(self, local: Tensor, streams: Sequence[str]) -> Tensor:
        """Gather streams: ``[B, local tokens, ...]`` of each rank to ``[B, tokens, ...]``, on every rank.

        A rank's tokens of one stream follow those of another. The result has one stream after another, in it one patch
        after another, each in the order of the stream.
        """
        shapes = [(local.shape[0], size, *local.shape[2:]) for size in self.predicted(streams)]
        return self.joined(all_gather(local, shapes, self.axis), streams)

    def joined(self, by_rank: Sequence[Tensor], streams: Sequence[str]) -> Tensor:
        """Put the tokens of all ranks, as ``unshard`` gathers them, in their order."""
        patches = [patch for name in streams for _, patch in self.streams[name].patches]
        if len(patches) == 1:
            return concat(by_rank, dim=1)
        parts = [tokens.split([patch.sizes[rank] for patch in patches], dim=1) for rank, tokens in enumerate(by_rank)]
        return torch.cat([part[i] for i in range(len(patches)) for part in parts], dim=1)


def take_slices(tensor: Tensor, parts: Sequence[slice]) -> Tensor:
    """Concatenate slices of dim 1 into a contiguous tensor; return the tensor itself if they cover all of it."""
    if len(parts) == 1 and parts[0] == slice(0, tensor.shape[1]):
        return tensor
    return concat([tensor[:, part] for part in parts], dim=1).contiguous()


def _taken(tensor: Tensor, parts: Sequence[slice] | None) -> Tensor:
    return tensor if parts is None else take_slices(tensor, parts)
