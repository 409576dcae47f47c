"""Ring attention (https://arxiv.org/abs/2310.01889): keys and values travel, queries stay.

Each rank holds a block of the tokens. While it attends to one block of keys and values, the next one arrives from its
neighbour; the partial results are merged by their log-sum-exp in float32. Blocks may be of any sizes. Exact.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import Kernel
from ..layout import ParallelLayout
from ..masks import Kept, attend_with_lse
from ..mesh import Axis
from ..partition import Partition
from .base import Job
from .sequence import site_tokens

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, ``[B, tokens, heads, head_dim]`` each, contiguous."""


class Ring:
    """Any number of ranks works for any number of tokens."""

    axes = ("ring",)

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """See ``Strategy.check``."""

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """Per attention the keys and values of all blocks but the next rank's, which end their way there."""
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in job.own(layout, place):
            for site in job.geometry.sites:
                local = Partition.even(site.heads, layout.tensor).sizes[place["tensor"]]
                heads = Partition.even(local, layout.ulysses).sizes[place["ulysses"]]
                blocks = [sum(tokens) for tokens in site_tokens(layout, extent, site)]
                passed = sum(blocks) - blocks[(place["ring"] + 1) % layout.ring]
                sent += samples * extent.rows * site.count * 2 * heads * site.head_dim * passed
        return sent * job.itemsize if layout.ring > 1 else 0


class RingAttention:
    """Attention of this rank's queries to the keys and values of all ranks of the axis.

    Args:
        sizes: tokens by rank; kept: which of them may be attended, by rank.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int], kept: Sequence[Kept | None], kernel: Kernel) -> None:
        self.axis, self.sizes, self.kept, self.kernel = axis, sizes, kept, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, own tokens, head_dim]``; see ``Attention``."""
        block = (_token_major(key), _token_major(value))
        del key, value
        merged = _Merge()
        for step in range(self.axis.size):
            owner = (self.axis.index - step) % self.axis.size
            arriving = self._pass_on(block, owner) if step + 1 < self.axis.size else None
            if query.numel() and self.sizes[owner]:
                k, v = (part.transpose(1, 2) for part in block)
                merged.add(
                    *attend_with_lse(self.kernel, (query, k, v), scale=scale, kept=self.kept[owner], sample=sample)
                )
            if arriving:
                block = arriving.wait()
        return merged.result(query)

    def _pass_on(self, block: Block, owner: int) -> "_Arriving":
        """Start to send a block to the next rank and to receive the one before it."""
        before = (owner - 1) % self.axis.size
        batch, _, heads, head_dim = block[0].shape
        incoming = tuple(part.new_empty(batch, self.sizes[before], heads, head_dim) for part in block)
        return _Arriving(block, (incoming[0], incoming[1]), self.axis)


class _Arriving:
    def __init__(self, leaving: Block, incoming: Block, axis: Axis) -> None:
        self.incoming = incoming
        to, source = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[(axis.index - 1) % axis.size]
        # Both sides know all sizes, so that an empty message is left out on both.
        ops = [dist.P2POp(dist.isend, part, to, group=axis.group) for part in leaving if part.numel()]
        ops += [dist.P2POp(dist.irecv, part, source, group=axis.group) for part in incoming if part.numel()]
        self.work = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Block:
        for work in self.work:
            work.wait()
        return self.incoming


class _Merge:
    """Partial results merged by their log-sum-exp, as in FlashAttention's split over keys."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Take in attention to some more keys."""
        if self.out is None:
            self.out, self.lse = out.float(), lse
            return
        both = torch.logaddexp(self.lse, lse)
        self.out = self.out * (self.lse - both).exp_()[..., None]
        self.out.addcmul_(out.float(), (lse - both).exp_()[..., None])
        self.lse = both

    def result(self, query: Tensor) -> Tensor:
        """Attention to all keys that were taken in, in the query's dtype."""
        return torch.zeros_like(query) if self.out is None else self.out.to(query.dtype)


def _token_major(tensor: Tensor) -> Tensor:
    """``[B, heads, tokens, head_dim]`` as ``[B, tokens, heads, head_dim]``, contiguous: no copy in most models."""
    return tensor.transpose(1, 2).contiguous()
