"""Ulysses sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Outside of attention each rank holds a shard of the tokens; inside it holds all tokens of a shard of the
heads. One exchange leads in, with q, k and v packed together, and one leads out. Neither tokens nor heads
need to divide: both are cut by a ``Partition``, and a rank may hold none of either. Exact.
"""

import torch
from torch import Tensor

from ..attention import Attention
from ..collectives import exchange
from ..layout import ParallelLayout
from ..mesh import Axis
from ..partition import Partition
from .base import Job
from .sequence import site_tokens


class Ulysses:
    """Exchanges around attention; with ``ring`` as well, the ring is what attends inside."""

    axes = ("ulysses",)

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """See ``Strategy.check``: any number of ranks works for any number of tokens and heads."""

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """Per attention q, k and v of the own tokens for the others' heads, and the own heads of their tokens."""
        place = layout.coordinates(rank)
        sent = 0
        for samples, extent in job.own(layout, place):
            for site in job.geometry.sites:
                local = Partition.even(site.heads, layout.tensor).sizes[place["tensor"]]
                own_heads = Partition.even(local, layout.ulysses).sizes[place["ulysses"]]
                tokens = site_tokens(layout, extent, site)[place["ring"]]
                own_tokens = tokens[place["ulysses"]]
                values = 3 * own_tokens * (local - own_heads) + (sum(tokens) - own_tokens) * own_heads
                sent += samples * extent.rows * site.count * site.head_dim * values
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
        q, k, v = self._to_heads(heads, query, key, value)
        # A rank without heads takes part in a ring inside as well, where it has nothing to send.
        return self._to_tokens(heads, self.inner(q, k, v, scale=scale, sample=sample))

    def _to_heads(self, heads: Partition, *qkv: Tensor) -> tuple[Tensor, ...]:
        """3 x ``[B, H, own tokens, D]`` to 3 x ``[B, own heads, S, D]``."""
        batch, _, _, head_dim = qkv[0].shape
        own = heads.sizes[self.axis.index]
        outgoing = [[t[:, heads.slice(i)] for t in qkv] for i in range(self.axis.size)]
        shapes = [(3, batch, own, size, head_dim) for size in self.tokens.sizes]
        received = exchange(outgoing, [3 * batch * own * size * head_dim for size in self.tokens.sizes], self.axis)
        packed = torch.cat([flat.view(shape) for flat, shape in zip(received, shapes, strict=True)], dim=3)
        return packed.unbind()

    def _to_tokens(self, heads: Partition, out: Tensor) -> Tensor:
        """``[B, own heads, S, D]`` to ``[B, H, own tokens, D]``."""
        batch, _, _, head_dim = out.shape
        own = self.tokens.sizes[self.axis.index]
        outgoing = [[out[:, :, self.tokens.slice(i)]] for i in range(self.axis.size)]
        shapes = [(batch, size, own, head_dim) for size in heads.sizes]
        received = exchange(outgoing, [batch * size * own * head_dim for size in heads.sizes], self.axis)
        return torch.cat([flat.view(shape) for flat, shape in zip(received, shapes, strict=True)], dim=1)
