"""Ulysses sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Outside of attention each rank holds a shard of the tokens; inside it holds all tokens of a shard of the
heads. One exchange leads in, with q, k and v packed together, and one leads out. Neither tokens nor heads
need to divide: both are cut by a ``Partition``, and a rank may hold none of either. Exact.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Attention
from ..collectives import all_gather, exchange
from ..layout import ParallelLayout
from ..mesh import Axis
from ..partition import Partition
from ..state import State
from .base import Job

_FLOAT32 = 4
"""Bytes of a guided prediction's value: guidance is applied in float32, as ComfyUI does."""


class Ulysses:
    """Shards the state after ``embed``, exchanges around attention, gathers what ``head`` predicted."""

    axes = ("ulysses",)

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """See ``Strategy.check``: any number of ranks works for any number of tokens and heads."""

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """Per layer q, k and v of the own tokens for the others' heads, and the own heads of their tokens;
        then once the guided prediction of the own tokens to each of them."""
        u = rank % layout.ulysses
        group = rank // layout.ulysses
        branches = Partition.even(job.branches, layout.cfg).sizes[group % layout.cfg]
        samples = Partition.even(job.samples, layout.data).sizes[group // layout.cfg]
        tokens, heads = Partition.even(job.tokens, layout.ulysses), Partition.even(job.heads, layout.ulysses)
        own_tokens, own_heads = tokens.sizes[u], heads.sizes[u]
        into = 3 * own_tokens * (heads.total - own_heads)
        out = own_heads * (tokens.total - own_tokens)
        attention = branches * samples * job.layers * (into + out) * job.head_dim * job.itemsize
        return attention + (layout.ulysses - 1) * samples * own_tokens * job.values * _FLOAT32

    @staticmethod
    def shard(state: State, axis: Axis) -> State:
        """Keep this rank's tokens of the state, and what is indexed by token with them."""
        if axis.size == 1:
            return state
        own = Partition.even(state.tokens.shape[1], axis.size).slice(axis.index)
        return replace(
            state,
            tokens=state.tokens[:, own].contiguous(),
            per_token={name: tensor[:, own].contiguous() for name, tensor in state.per_token.items()},
        )

    @staticmethod
    def unshard(own: Tensor, tokens: int, axis: Axis) -> Tensor:
        """``[B, own tokens, ...]`` of every rank to ``[B, tokens, ...]`` on every rank."""
        if axis.size == 1:
            return own
        sizes = Partition.even(tokens, axis.size).sizes
        return torch.cat(all_gather(own, [(own.shape[0], size, *own.shape[2:]) for size in sizes], axis), dim=1)

    @staticmethod
    def attention(axis: Axis, *, tokens: int, heads: int) -> Attention:
        """Attention over all ``tokens`` for the seam of a rank that holds a shard of them."""
        return _UlyssesAttention(axis, Partition.even(tokens, axis.size), Partition.even(heads, axis.size))


class _UlyssesAttention:
    def __init__(self, axis: Axis, tokens: Partition, heads: Partition) -> None:
        self.axis, self.tokens, self.heads = axis, tokens, heads

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if attn_mask is not None or options.get("is_causal"):
            raise ValueError("Ulysses has no masked attention: no family built so far needs it")
        q, k, v = self._to_heads(query, key, value)
        out = F.scaled_dot_product_attention(q, k, v, **options) if q.shape[1] else q
        return self._to_tokens(out)

    def _to_heads(self, *qkv: Tensor) -> tuple[Tensor, ...]:
        """3 x ``[B, H, own tokens, D]`` to 3 x ``[B, own heads, S, D]``."""
        batch, _, _, head_dim = qkv[0].shape
        own = self.heads.sizes[self.axis.index]
        outgoing = [[t[:, self.heads.slice(i)] for t in qkv] for i in range(self.axis.size)]
        shapes = [(3, batch, own, size, head_dim) for size in self.tokens.sizes]
        received = exchange(outgoing, [3 * batch * own * size * head_dim for size in self.tokens.sizes], self.axis)
        packed = torch.cat([flat.view(shape) for flat, shape in zip(received, shapes, strict=True)], dim=3)
        return packed.unbind()

    def _to_tokens(self, out: Tensor) -> Tensor:
        """``[B, own heads, S, D]`` to ``[B, H, own tokens, D]``."""
        batch, _, _, head_dim = out.shape
        own = self.tokens.sizes[self.axis.index]
        outgoing = [[out[:, :, self.tokens.slice(i)]] for i in range(self.axis.size)]
        shapes = [(batch, size, own, head_dim) for size in self.heads.sizes]
        received = exchange(outgoing, [batch * size * own * head_dim for size in self.heads.sizes], self.axis)
        return torch.cat([flat.view(shape) for flat, shape in zip(received, shapes, strict=True)], dim=1)
