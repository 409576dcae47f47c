"""Ring attention (https://arxiv.org/abs/2310.01889): keys and values go around the ranks, queries stay.

Each rank holds a block of the tokens. While it attends to one block of keys and values, it receives the next block
from its neighbour. Partial results are merged by their log-sum-exp in float32. Blocks may have any sizes. Exact.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend_with_lse
from ..distributed.collectives import Work, start_messages, wait_all
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from .sequence import site_tokens

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, ``[B, tokens, heads, head_dim]`` each, contiguous."""


class Ring:
    """Passes keys and values around the ring. Works for any number of ranks and tokens."""

    axes = ("ring",)

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse nothing."""

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Count, for each attention, the keys and values of all blocks except the next rank's.

        The next rank's block started there, so it is not passed on to it.
        """
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in workload.local_branches(layout, place):
            for site, count in workload.row_sites(layout, place):
                heads = workload.heads(layout, site, place).local_keys(place["ulysses"])
                blocks = [sum(tokens) for tokens in site_tokens(layout, workload, extent, site)]
                passed_on = sum(blocks) - blocks[(place["ring"] + 1) % layout.ring]
                sent += samples * extent.rows * count * 2 * heads * workload.head_dim(site, extent) * passed_on
        return sent * workload.itemsize if layout.ring > 1 else 0


class RingAttention:
    """Attention of this rank's queries to the keys and values of all ranks of the axis.

    Args:
        sizes: number of tokens of each rank.
        key_masks: for each rank, which of its keys may be attended to; None for all. Each rank puts its unmasked keys
            first before it sends them.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int], key_masks: Sequence[KeyMask | None], kernel: Kernel) -> None:
        self.axis, self.sizes, self.key_masks, self.kernel = axis, sizes, key_masks, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, local tokens, head_dim]``; see ``Attention``.

        At most two blocks exist at a time: an incoming block is received into the memory of a block that was already
        sent, if it fits. That may be the memory of ``key`` and ``value``, which the calling module still holds but
        does not read again.
        """
        block = (_token_major(key), _token_major(value))
        del key, value
        if mask := self.key_masks[self.axis.index]:
            mask.move(block[0].transpose(1, 2), block[1].transpose(1, 2), sample)
        merged, sent_blocks, has_queries = _Merge(), list[Block](), query.numel() > 0
        last = self.axis.size - 1
        for step in range(self.axis.size):
            owner = (self.axis.index - step) % self.axis.size
            incoming = self._pass_on(block, owner, sent_blocks) if step < last else None
            if has_queries and self.sizes[owner]:
                merged.add(*self._attend(query, block, owner, scale=scale, sample=sample))
            if incoming:
                wait_all(incoming[1])
                sent_blocks.append(block)
                block, incoming = incoming[0], None  # works hold what they have sent
        return merged.result(query)

    def _attend(
        self, query: Tensor, block: Block, owner: int, *, scale: float | None, sample: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to one block; return the values and the log-sum-exp.

        This is a separate method so that no view of the block outlives the call.
        """
        k, v, mask = block[0].transpose(1, 2), block[1].transpose(1, 2), self.key_masks[owner]
        if mask is None:
            return self.kernel.with_lse(query, k, v, scale)
        return attend_with_lse(self.kernel, (query, k, v), scale=scale, key_mask=mask, sample=sample, moved=True)

    def _pass_on(self, block: Block, owner: int, sent_blocks: list[Block]) -> tuple[Block, Sequence[Work]]:
        """Start sending a block to the next rank and receiving one from the previous rank, which is returned.

        Args:
            block: the block to send.
            owner: the rank whose tokens it holds.
            sent_blocks: blocks whose memory may be reused; one that is reused is removed.
        """
        (batch, _, heads, head_dim), ranks = block[0].shape, self.axis.size
        to, source = (self.axis.index + 1) % ranks, (self.axis.index - 1) % ranks
        shape = (batch, self.sizes[(owner - 1) % ranks], heads, head_dim)
        reusable = sent_blocks.pop() if sent_blocks else None
        if reusable and reusable[0].shape == shape:
            received = reusable
        elif reusable is None or reusable[0].numel() < math.prod(shape):
            del reusable
            received = (block[0].new_empty(shape), block[1].new_empty(shape))
        else:
            received = (_view_as(reusable[0], shape), _view_as(reusable[1], shape))
        sends, receives = [(to, part) for part in block], [(source, part) for part in received]
        return received, start_messages(sends, receives, self.axis)


def _view_as(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """View the beginning of a contiguous buffer as a tensor of a shape."""
    return buffer.view(-1)[: math.prod(shape)].view(*shape)


class _Merge:
    """Merges partial attention results by their log-sum-exp, as FlashAttention does when it splits the keys."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add attention to more keys."""
        if self.out is None:
            self.out, self.lse = out.float(), lse
            return
        share = torch.sub(lse, self.lse).sigmoid_().unsqueeze(-1)
        self.out.lerp_(out.float(), share)
        torch.logaddexp(self.lse, lse, out=self.lse)

    def result(self, query: Tensor) -> Tensor:
        """Return the attention to all added keys, in the query's dtype; zeros if there were none."""
        return torch.zeros_like(query) if self.out is None else self.out.to(query.dtype)


def _token_major(tensor: Tensor) -> Tensor:
    """``[B, heads, tokens, head_dim]`` to ``[B, tokens, heads, head_dim]``, contiguous; no copy in most models."""
    return tensor.transpose(1, 2).contiguous()
