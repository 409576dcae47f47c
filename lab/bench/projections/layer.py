"""An attention layer over ranks, by several ways to get from each rank's tokens to each rank's heads."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.denoiser.attention_chain import LocalAttention
from parallel_backend.distributed.collectives import Work, all_gather, start_exchange, wait_all
from parallel_backend.distributed.mesh import Axis
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.split import Split
from parallel_backend.strategies.ulysses import UlyssesAttention, place

HEAD_DIM = 128


class Layer:
    """The projections and the attention of one layer. This rank holds a part of the tokens.

    Attributes:
        ways: functions that return the result for this rank's tokens, ``[1, local tokens, width]``.
    """

    def __init__(self, tokens: int, heads: int, device: torch.device) -> None:
        ranks, rank, width = dist.get_world_size(), dist.get_rank(), heads * HEAD_DIM
        gloo = dist.get_backend() == "gloo"
        self.axis = Axis(name="ulysses", ranks=tuple(range(ranks)), index=rank, group=dist.group.WORLD, gloo=gloo)
        split = Split.of(ParallelLayout(ulysses=ranks))
        self.tokens, self.heads = split.tokens(tokens), split.heads(heads, heads)
        self._attend = partial(LocalAttention(KERNELS["sdpa"], None), scale=None, sample=None)
        self.ulysses = UlyssesAttention(self.axis, self.tokens, split, self._attend)
        generator = torch.Generator().manual_seed(0)
        self.whole = torch.randn(1, tokens, width, generator=generator).to(device)
        self.local = self.whole[:, self.tokens.slice(rank)].contiguous()
        weights = torch.randn(4, width, width, generator=generator).to(device) / width**0.5
        *self.qkv, self.out = weights.unbind()
        self.ways = {"exchange": self.exchange, "halves": self.halves, "pieces": self.pieces, "gather": self.gather}

    def alone(self) -> Tensor:
        """Compute the result with no other rank."""
        q, k, v = (_heads(self.whole, weight) for weight in self.qkv)
        whole = self._joined(self._attend(q, k, v))
        return whole[:, self.tokens.slice(self.axis.index)]

    def exchange(self) -> Tensor:
        """Project the local tokens, then exchange q, k and v together, as Ulysses does here."""
        q, k, v = (_heads(self.local, weight) for weight in self.qkv)
        return self._joined(self.ulysses._attend([self.heads], (q, k, v), self._attend))

    def pieces(self) -> Tensor:
        """Start to send each of q, k and v when it is projected, while the next is computed."""
        sent = [self._start(_heads(self.local, weight)) for weight in self.qkv]
        for works, _, _ in sent:
            wait_all(works)
        q, k, v = (whole.permute(1, 0, 2)[None] for _, whole, _ in sent)
        return self._to_tokens(self._attend(q, k, v))

    def gather(self) -> Tensor:
        """Gather all tokens, then project them with the rows of the local heads alone."""
        shapes = [(1, size, self.local.shape[2]) for size in self.tokens.sizes]
        whole = torch.cat(all_gather(self.local, shapes, self.axis), dim=1)
        heads = self.heads.queries.slice(self.axis.index)
        rows = slice(heads.start * HEAD_DIM, heads.stop * HEAD_DIM)
        q, k, v = (_heads(whole, weight[rows]) for weight in self.qkv)
        return self._to_tokens(self._attend(q, k, v))

    def halves(self) -> Tensor:
        """Exchange half of the heads while the other half attends: what Ulysses tries here."""
        q, k, v = (_heads(self.local, weight) for weight in self.qkv)
        return self._joined(self.ulysses._attend(self.heads.halves, (q, k, v), self._attend))

    def _start(self, projected: Tensor) -> tuple[list[Work], Tensor, list[Tensor]]:
        """Start to exchange ``[1, heads, local tokens, D]``; return what arrives, ``[tokens, local heads, D]``."""
        rank = self.axis.index
        outgoing = [part.transpose(0, 1).contiguous() for part in projected[0].split(self.heads.sizes)]
        whole = projected.new_empty(self.tokens.total, self.heads.sizes[rank], HEAD_DIM)
        incoming = whole.split(self.tokens.sizes)
        incoming[rank].copy_(outgoing[rank])
        works = start_exchange([[part] for part in outgoing], [[part] for part in incoming], self.axis)
        return list(works), whole, outgoing

    def _to_tokens(self, out: Tensor) -> Tensor:
        result = out.new_empty(1, self.tokens.sizes[self.axis.index], self.heads.queries.total, HEAD_DIM)
        place(self.heads, self.ulysses._to_tokens(self.heads, out).wait(), result)
        return self._joined(result.transpose(1, 2))

    def _joined(self, out: Tensor) -> Tensor:
        return F.linear(out.transpose(1, 2).flatten(2), self.out)


def _heads(tokens: Tensor, weight: Tensor) -> Tensor:
    heads: Tensor = F.linear(tokens, weight).unflatten(2, (-1, HEAD_DIM))
    return heads.transpose(1, 2)
