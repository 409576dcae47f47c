"""Ulysses sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Outside attention, each rank holds some of the tokens with all heads; inside, all tokens with some of the heads. One
all-to-all exchange with q, k and v packed together leads into attention, and one leads out. The numbers of tokens and
heads need not be divisible by the number of ranks: a ``Partition`` splits both, and a rank may hold none of either.
Where query heads share key heads, a rank gets each key head that it needs once. Exact.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..attention.routing import Attention
from ..distributed.collectives import all_to_all, start_exchange, wait_all
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.head_split import HeadSplit
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .sequence import site_tokens


class Ulysses:
    """Exchanges tokens for heads around attention. In a layout with ``ring`` as well, the ring attends inside."""

    axes = ("ulysses",)

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse nothing: any number of ranks works for any number of tokens and heads."""

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count, for each attention, what this rank sends into it and out of it.

        Into it go q, k and v of this rank's tokens for the other ranks' heads; out of it go the results of this rank's
        heads for the other ranks' tokens.
        """
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in workload.local_branches(layout, place):
            for site, count in workload.sites(layout, place):
                heads, ulysses = workload.heads(layout, site, place), place["ulysses"]
                local_heads = heads.queries.sizes[ulysses]
                for_others = sum(sum(heads.counts(i)) for i in range(layout.ulysses) if i != ulysses)
                tokens = site_tokens(layout, workload, extent, site)[place["ring"]]
                local_tokens = tokens[ulysses]
                values = local_tokens * for_others + (sum(tokens) - local_tokens) * local_heads
                sent += samples * extent.rows * count * site.head_dim * values
        return sent * workload.itemsize


class UlyssesAttention:
    """Attention over the tokens of all ranks of the axis.

    Args:
        axis: the ranks that exchange tokens for heads.
        tokens: number of tokens of each rank.
        inner: attends with the tokens of all ranks and this rank's heads.
    """

    def __init__(self, axis: Axis, tokens: Partition, inner: Attention) -> None:
        self.axis, self.tokens, self.inner = axis, tokens, inner

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, local tokens, head_dim]``; see ``Attention``."""
        heads = HeadSplit.even(query.shape[1], key.shape[1], self.axis.size)
        # gloo sends parts between two ranks faster. For NCCL one operation is one launch.
        to_heads, to_tokens = (
            (self._to_heads, self._to_tokens) if self.axis.gloo else (self._all_to_heads, self._all_to_tokens)
        )
        q, k, v = to_heads(heads, (query, key, value))
        repeats = heads.repeats(self.axis.index)
        k, v = _repeated(k, repeats), _repeated(v, repeats)
        # A rank without heads calls ``inner`` too: a ring inside needs every rank, even one with nothing to send.
        return to_tokens(heads.queries, self.inner(q, k, v, scale=scale, sample=sample))

    def _to_heads(self, heads: HeadSplit, qkv: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Exchange 3 x ``[B, heads, local tokens, D]`` for 3 x ``[B, local heads, tokens, D]``.

        The results are views of one tensor whose first dim is the tokens, so each rank's part arrives in place.
        """
        rank, (batch, _, local_tokens, head_dim) = self.axis.index, qkv[0].shape
        counts = [heads.counts(i) for i in range(self.axis.size)]
        packed = qkv[0].new_empty(self.tokens.total, batch, sum(counts[rank]), head_dim)
        incoming = packed.split(self.tokens.sizes)
        outgoing = [
            incoming[rank] if i == rank else packed.new_empty(local_tokens, batch, sum(each), head_dim)
            for i, each in enumerate(counts)
        ]
        for i, part in enumerate(outgoing):
            _pack(heads, i, qkv, part)
        wait_all(start_exchange([[part] for part in outgoing], [[part] for part in incoming], self.axis))
        return [tensor.permute(1, 2, 0, 3) for tensor in packed.split(counts[rank], dim=2)]

    def _to_tokens(self, heads: Partition, out: Tensor) -> Tensor:
        """Exchange ``[B, local heads, tokens, D]`` for ``[B, heads, local tokens, D]``.

        In memory both are ``[B, tokens, heads, D]``, which is what kernels return and models expect.
        """
        rank, (batch, _, _, head_dim) = self.axis.index, out.shape
        outgoing = [part.transpose(1, 2).contiguous() for part in out.split(self.tokens.sizes, dim=2)]
        incoming = [
            outgoing[rank] if i == rank else out.new_empty(batch, self.tokens.sizes[rank], size, head_dim)
            for i, size in enumerate(heads.sizes)
        ]
        wait_all(start_exchange([[part] for part in outgoing], [[part] for part in incoming], self.axis))
        return torch.cat(incoming, dim=2).transpose(1, 2)

    def _all_to_heads(self, heads: HeadSplit, qkv: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Do what ``_to_heads`` does in one operation."""
        rank, (batch, _, local_tokens, head_dim) = self.axis.index, qkv[0].shape
        counts, width = [heads.counts(i) for i in range(self.axis.size)], batch * head_dim
        send_sizes = [local_tokens * sum(each) * width for each in counts]
        sent = qkv[0].new_empty(sum(send_sizes))
        if heads.shared == 1:
            self._pack_runs(heads.queries, qkv, sent)
        else:
            for i, part in enumerate(sent.split(send_sizes)):
                _pack(heads, i, qkv, part.view(local_tokens, batch, sum(counts[i]), head_dim))
        received = sent.new_empty(self.tokens.total, batch, sum(counts[rank]), head_dim)
        receive_sizes = [size * sum(counts[rank]) * width for size in self.tokens.sizes]
        all_to_all(sent, send_sizes, received, receive_sizes, self.axis)
        return [tensor.permute(1, 2, 0, 3) for tensor in received.split(counts[rank], dim=2)]

    def _pack_runs(self, heads: Partition, qkv: tuple[Tensor, Tensor, Tensor], sent: Tensor) -> None:
        """Do what ``_pack`` does for all ranks, with a copy for each of q, k and v if the heads divide."""
        batch, _, local_tokens, head_dim = qkv[0].shape
        width = batch * 3 * head_dim
        for first, ranks, size in _runs(heads):
            part = sent[first * local_tokens * width :][: ranks * size * local_tokens * width]
            packed = part.view(ranks, local_tokens, batch, 3, size, head_dim)
            for j, tensor in enumerate(qkv):
                taken = tensor[:, first : first + ranks * size].unflatten(1, (ranks, size))
                packed[:, :, :, j].copy_(taken.permute(1, 3, 0, 2, 4))

    def _all_to_tokens(self, heads: Partition, out: Tensor) -> Tensor:
        """Do what ``_to_tokens`` does in one operation."""
        (batch, local_heads, _, head_dim), local_tokens = out.shape, self.tokens.sizes[self.axis.index]
        width = batch * head_dim
        sent = out.permute(2, 0, 1, 3).contiguous()
        received = out.new_empty(heads.total * local_tokens * width)
        receive_sizes = [local_tokens * size * width for size in heads.sizes]
        all_to_all(sent, [size * local_heads * width for size in self.tokens.sizes], received, receive_sizes, self.axis)
        result = out.new_empty(batch, local_tokens, heads.total, head_dim)
        for first, ranks, size in _runs(heads):
            part = received[first * local_tokens * width :][: ranks * size * local_tokens * width]
            packed = part.view(ranks, local_tokens, batch, size, head_dim)
            result[:, :, first : first + ranks * size].unflatten(2, (ranks, size)).copy_(packed.permute(2, 1, 0, 3, 4))
        return result.transpose(1, 2)


def _pack(heads: HeadSplit, rank: int, qkv: tuple[Tensor, Tensor, Tensor], part: Tensor) -> None:
    """Copy the heads of q, k and v that a rank needs to ``part`` ``[local tokens, B, heads, D]``."""
    taken = heads.queries.slice(rank), heads.keys(rank), heads.keys(rank)
    for own, tensor, place in zip(part.split(heads.counts(rank), dim=2), qkv, taken, strict=True):
        own.copy_(tensor[:, place].permute(2, 0, 1, 3))


def _runs(heads: Partition) -> Iterator[tuple[int, int, int]]:
    """Yield the first head, the number of ranks and the size of each run of ranks that hold equally many heads."""
    first = 0
    for size, ranks in groupby(heads.sizes):
        count = len(list(ranks))
        if size:
            yield first, count, size
        first += count * size


def _repeated(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeat the heads of ``[B, heads, tokens, D]``; return the tensor itself if each stands once."""
    if all(count == 1 for count in repeats):
        return tensor
    heads = zip(tensor.split(1, dim=1), repeats, strict=True)
    return torch.cat([head.expand(-1, count, -1, -1) for head, count in heads], dim=1)
