"""Ulysses sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Outside of attention each rank holds a shard of the tokens; inside it holds all tokens of a shard of the
heads. One exchange leads in, with q, k and v packed together, and one leads out. Neither tokens nor heads
need to divide: both are cut by a ``Partition``, and a rank may hold none of either. Exact.
"""

import torch
from torch import Tensor

from ..attention.routing import Attention
from ..distributed.collectives import start, wait
from ..distributed.mesh import Axis
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .sequence import site_tokens


class Ulysses:
    """Exchanges around attention; with ``ring`` as well, the ring is what attends inside."""

    axes = ("ulysses",)

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """See ``Strategy.check``: any number of ranks works for any number of tokens and heads."""

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """Per attention q, k and v of the own tokens for the others' heads, and the own heads of their tokens."""
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in job.own(layout, place):
            for site, count in job.sites(layout, place):
                heads, own_heads = job.heads(layout, site, place)
                tokens = site_tokens(layout, job, extent, site)[place["ring"]]
                own_tokens = tokens[place["ulysses"]]
                values = 3 * own_tokens * (heads - own_heads) + (sum(tokens) - own_tokens) * own_heads
                sent += samples * extent.rows * count * site.head_dim * values
        return sent * job.itemsize


class UlyssesAttention:
    """Attention over the tokens of all ranks of the axis.

    Args:
        tokens: by rank.
        inner: attends with all of those tokens and this rank's heads.
    """

    def __init__(self, axis: Axis, tokens: Partition, inner: Attention) -> None:
        self.axis, self.tokens, self.inner = axis, tokens, inner

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, own tokens, head_dim]``; see ``Attention``."""
        heads = Partition.even(query.shape[1], self.axis.size)
        q, k, v = self._to_heads(heads, (query, key, value))
        # A rank without heads takes part in a ring inside as well, where it has nothing to send.
        return self._to_tokens(heads, self.inner(q, k, v, scale=scale, sample=sample))

    def _to_heads(self, heads: Partition, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """3 x ``[B, H, own tokens, D]`` to 3 x ``[B, own heads, S, D]``, views of one tensor with the tokens outmost:
        so what a rank sends arrives in its place."""
        own, (batch, _, own_tokens, head_dim) = self.axis.index, qkv[0].shape
        packed = qkv[0].new_empty(self.tokens.total, batch, 3, heads.sizes[own], head_dim)
        arriving = packed.split(self.tokens.sizes)
        leaving = [
            arriving[own] if i == own else packed.new_empty(own_tokens, batch, 3, size, head_dim)
            for i, size in enumerate(heads.sizes)
        ]
        for i, part in enumerate(leaving):
            for place, tensor in enumerate(qkv):
                part[:, :, place].copy_(tensor[:, heads.slice(i)].permute(2, 0, 1, 3))
        wait(start([[part] for part in leaving], [[part] for part in arriving], self.axis))
        return packed.permute(2, 1, 3, 0, 4).unbind()

    def _to_tokens(self, heads: Partition, out: Tensor) -> Tensor:
        """``[B, own heads, S, D]`` to ``[B, H, own tokens, D]``; both lie with the heads next to their values, as what
        kernels give and what models take."""
        own, (batch, _, _, head_dim) = self.axis.index, out.shape
        leaving = [part.transpose(1, 2).contiguous() for part in out.split(self.tokens.sizes, dim=2)]
        arriving = [
            leaving[own] if i == own else out.new_empty(batch, self.tokens.sizes[own], size, head_dim)
            for i, size in enumerate(heads.sizes)
        ]
        wait(start([[part] for part in leaving], [[part] for part in arriving], self.axis))
        return torch.cat(arriving, dim=2).transpose(1, 2)
