"""Cutting the tokens of a row over the ranks of the sequence (``ring`` and ``ulysses`` together).

Every stream is cut by itself, so that text is shared out like image tokens. What attention sees is all of rank 0's
tokens, then all of rank 1's, in which order does not matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.collectives import all_gather, join
from ..distributed.mesh import Axis
from ..interfaces.state import State
from ..layout.partition import Partition


@dataclass(frozen=True)
class StreamPartition:
    """The tokens of a stream that are computed together: ``patches`` of it, each cut over the ranks.

    A patch is where it starts, and the ranks' shares of it in order.
    """

    patches: tuple[tuple[int, Partition], ...]

    @classmethod
    def even(cls, start: int, length: int, ranks: int) -> "StreamPartition":
        """One patch, cut evenly."""
        return cls(((start, Partition.even(length, ranks)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens by rank."""
        return tuple(map(sum, zip(*(shares.sizes for _, shares in self.patches), strict=True)))

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.sizes)

    def of(self, rank: int) -> list[slice]:
        """Where a rank's tokens lie in the stream."""
        return [_moved(shares.slice(rank), start) for start, shares in self.patches]


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """How the streams of a row are cut, and which shares this rank holds."""

    axis: Axis
    streams: Mapping[str, StreamPartition]

    @classmethod
    def even(cls, lengths: Mapping[str, int], axis: Axis) -> "TokenSplit":
        """Whole streams of these lengths, cut evenly over an axis."""
        return cls(
            axis=axis, streams={name: StreamPartition.even(0, length, axis.size) for name, length in lengths.items()}
        )

    @classmethod
    def weighted(cls, lengths: Mapping[str, int], axis: Axis, weights: Sequence[float]) -> "TokenSplit":
        """Whole streams of these lengths, cut in proportion to ``weights`` by rank."""
        streams = {
            name: StreamPartition(((0, Partition.weighted(length, weights)),)) for name, length in lengths.items()
        }
        return cls(axis=axis, streams=streams)

    def tokens(self, streams: Sequence[str]) -> Partition:
        """The tokens of several streams together, by rank."""
        return Partition(tuple(map(sum, zip(*(self.streams[name].sizes for name in streams), strict=True))))

    def masks(self, masks: Mapping[str, Tensor], streams: Sequence[str]) -> list[Tensor] | None:
        """By rank, which of its tokens of ``streams`` may be attended ``[B, tokens]``; None if all may be."""
        if not any(name in masks for name in streams):
            return None
        some = next(iter(masks.values()))
        ones = {name: some.new_ones(len(some), shares.total) for name, shares in self.streams.items()}
        return [
            torch.cat(
                [masks[name][:, part] if name in masks else ones[name][:, : part.stop - part.start]
                 for name in streams for part in self.streams[name].of(rank)],
                dim=1,
            )
            for rank in range(self.axis.size)
        ]  # fmt: skip

    def shard(self, state: State) -> State:
        """Keep this rank's tokens of every stream, and what is indexed by token with them."""
        own = {name: shares.of(self.axis.index) for name, shares in self.streams.items()}
        return State(
            streams={name: take(tokens, own[name]) for name, tokens in state.streams.items()},
            tables={
                name: {key: take(table, own[name]) for key, table in tables.items()}
                for name, tables in state.tables.items()
            },
            masks=state.masks,
            context=state.context,
        )

    def unshard(self, own: Tensor, stream: str) -> Tensor:
        """``[B, own tokens, ...]`` of every rank to ``[B, tokens, ...]`` on every rank, patch after patch."""
        shares = self.streams[stream]
        gathered = all_gather(own, [(own.shape[0], size, *own.shape[2:]) for size in shares.sizes], self.axis)
        if len(shares.patches) == 1:
            return join(gathered, dim=1)
        parts = [
            whole.split([patch.sizes[rank] for _, patch in shares.patches], dim=1)
            for rank, whole in enumerate(gathered)
        ]
        return torch.cat([by_rank[i] for i in range(len(shares.patches)) for by_rank in parts], dim=1)


def take(tensor: Tensor, parts: Sequence[slice]) -> Tensor:
    """The parts of a tensor along dim 1, contiguous; the tensor itself if they are all of it."""
    if len(parts) == 1 and parts[0] == slice(0, tensor.shape[1]):
        return tensor
    return join([tensor[:, part] for part in parts], dim=1).contiguous()


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
