"""Ring attention (https://arxiv.org/abs/2310.01889): keys and values travel, queries stay.

Each rank holds a block of the tokens. While it attends to one block of keys and values, the next one arrives from its
neighbour; the partial results are merged by their log-sum-exp in float32. Blocks may be of any sizes. Exact.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend_with_lse
from ..distributed.collectives import Work, start, wait
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from .sequence import site_tokens

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, ``[B, tokens, heads, head_dim]`` each, contiguous."""


class Ring:
    """Any number of ranks works for any number of tokens."""

    axes = ("ring",)

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``."""

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """Per attention the keys and values of all blocks but the next rank's, which end their way there."""
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in job.own(layout, place):
            for site, count in job.sites(layout, place):
                _, heads = job.heads(layout, site, place)
                blocks = [sum(tokens) for tokens in site_tokens(layout, job, extent, site)]
                passed = sum(blocks) - blocks[(place["ring"] + 1) % layout.ring]
                sent += samples * extent.rows * count * 2 * heads * site.head_dim * passed
        return sent * job.itemsize if layout.ring > 1 else 0


class RingAttention:
    """Attention of this rank's queries to the keys and values of all ranks of the axis.

    Args:
        sizes: tokens by rank; kept: which of them may be attended, by rank.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int], kept: Sequence[KeyMask | None], kernel: Kernel) -> None:
        self.axis, self.sizes, self.kept, self.kernel = axis, sizes, kept, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, own tokens, head_dim]``; see ``Attention``.

        Blocks that arrive are laid over those that have left, where they fit, and so over ``key`` and ``value``, which
        the module that asks goes on holding and does not read again: there are never more than two blocks.
        """
        block = (_token_major(key), _token_major(value))
        del key, value
        merged, left = _Merge(), list[Block]()
        for step in range(self.axis.size):
            owner = (self.axis.index - step) % self.axis.size
            arriving = self._pass_on(block, owner, left) if step + 1 < self.axis.size else None
            if query.numel() and self.sizes[owner]:
                merged.add(*self._attend(query, block, owner, scale=scale, sample=sample))
            if arriving:
                left.append(block)
                block = arriving.wait()
        return merged.result(query)

    def _attend(
        self, query: Tensor, block: Block, owner: int, *, scale: float | None, sample: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attention to one block, and its log-sum-exp. By itself, so that no view of the block outlives it."""
        k, v = (part.transpose(1, 2) for part in block)
        return attend_with_lse(self.kernel, (query, k, v), scale=scale, kept=self.kept[owner], sample=sample)

    def _pass_on(self, block: Block, owner: int, left: list[Block]) -> "_Arriving":
        """Start to send a block to the next rank and to receive the one before it, over one that has ``left``."""
        batch, _, heads, head_dim = block[0].shape
        place, ranks = self.axis.index, self.axis.size
        shape = (batch, self.sizes[(owner - 1) % ranks], heads, head_dim)
        room = left.pop() if left else None
        if room is None or room[0].numel() < math.prod(shape):
            del room
            incoming = (block[0].new_empty(shape), block[1].new_empty(shape))
        else:
            incoming = (_laid_over(room[0], shape), _laid_over(room[1], shape))
        leaving, arriving = [list[Tensor]() for _ in range(ranks)], [list[Tensor]() for _ in range(ranks)]
        leaving[(place + 1) % ranks] += block
        arriving[(place - 1) % ranks] += incoming
        return _Arriving(block, incoming, start(leaving, arriving, self.axis))


def _laid_over(room: Tensor, shape: Sequence[int]) -> Tensor:
    return room.view(-1)[: math.prod(shape)].view(*shape)


class _Arriving:
    """A block on its way here, and the one that leaves meanwhile, which is kept until it has left."""

    def __init__(self, leaving: Block, incoming: Block, works: Sequence[Work]) -> None:
        self.incoming, self._leaving = incoming, (leaving, works)

    def wait(self) -> Block:
        """The block; the other one is let go."""
        wait(self._leaving[1])
        del self._leaving
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
        self.out.mul_((self.lse - both).exp_()[..., None])
        self.out.addcmul_(out.float(), (lse - both).exp_()[..., None])
        self.lse = both

    def result(self, query: Tensor) -> Tensor:
        """Attention to all keys that were taken in, in the query's dtype."""
        return torch.zeros_like(query) if self.out is None else self.out.to(query.dtype)


def _token_major(tensor: Tensor) -> Tensor:
    """``[B, heads, tokens, head_dim]`` as ``[B, tokens, heads, head_dim]``, contiguous: no copy in most models."""
    return tensor.transpose(1, 2).contiguous()
