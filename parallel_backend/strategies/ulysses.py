"""Ulysses sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Outside attention, each rank holds some of the tokens with all heads; inside, all tokens with some of the heads. One
all-to-all exchange with q, k and v packed together leads into attention, and one leads out. The numbers of tokens and
heads need not be divisible by the number of ranks: a ``Partition`` splits both, and a rank may hold none of either.
Where query heads share key heads, a rank gets each key head that it needs once. Exact.

On slow links, half of the heads can be exchanged while the other half attends. Which is faster is tried, so where a
kernel rounds other numbers of heads otherwise, two starts of the backend may differ by rounding. To gather the hidden
state instead, or to send q, k and v one by one under the projections, gains no more (``lab bench projections``).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..attention.routing import Attention
from ..distributed.collectives import Work, start_all_to_all, wait_all
from ..distributed.mesh import Axis
from ..distributed.trials import RowTrials
from ..interfaces.strategy import Workload
from ..layout.head_split import HeadSplit, Run
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.split import Split
from .sequence import site_tokens

QKV = tuple[Tensor, Tensor, Tensor]


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
            for site, count in workload.row_sites(layout, place):
                heads, ulysses = workload.heads(layout, site, place), place["ulysses"]
                local_heads = heads.queries.sizes[ulysses]
                for_others = sum(sum(counts) for i, counts in enumerate(heads.counts) if i != ulysses)
                tokens = site_tokens(layout, workload, extent, site)[place["ring"]]
                local_tokens = tokens[ulysses]
                values = local_tokens * for_others + (sum(tokens) - local_tokens) * local_heads
                sent += samples * extent.rows * count * workload.head_dim(site, extent) * values
        return sent * workload.itemsize


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """An exchange under way.

    Attributes:
        works: its communication.
        sent: what leaves. It is kept until it has left.
        received: what arrives.
    """

    works: Sequence[Work]
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """Wait for it, and return what has arrived."""
        wait_all(self.works)
        return self.received


class UlyssesAttention:
    """Attention over the tokens of all ranks of the axis.

    Args:
        axis: the ranks that exchange tokens for heads.
        tokens: number of tokens of each rank.
        split: shares the heads.
        inner: attends with the tokens of all ranks and this rank's heads.
        trials: find out whether it is faster to exchange half of the heads while the other half attends. None where
            ``inner`` has to see all heads in one call.
    """

    def __init__(
        self, axis: Axis, tokens: Partition, split: Split, inner: Attention, trials: RowTrials | None = None
    ) -> None:
        self.axis, self.tokens, self.split, self.inner, self.trials = axis, tokens, split, inner, trials

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, local tokens, head_dim]``; see ``Attention``."""
        heads, qkv = self.split.heads(query.shape[1], key.shape[1]), (query, key, value)
        inner = partial(self.inner, scale=scale, sample=sample)
        if self.trials is None or heads.shared > 1 or min(heads.queries.sizes) < 2:
            return self._attend([heads], qkv, inner)
        batch, count, _, head_dim = query.shape
        trial = self.trials.of((count, head_dim, query.dtype, sample), batch)
        if trial is None or trial.second is not None:
            return self._attend(heads.halves if trial and trial.second else [heads], qkv, inner)
        with trial.turn(query.device, self.trials.axis) as halved:
            return self._attend(heads.halves if halved else [heads], qkv, inner)

    def _attend(self, parts: Sequence[HeadSplit], qkv: QKV, inner: Callable[..., Tensor]) -> Tensor:
        """Attend with the heads of each part in turn. Exchanges of the others are under way meanwhile."""
        arriving, leaving = deque((part, self._to_heads(part, qkv)) for part in parts), list[_Exchange]()
        while arriving:
            part, exchange = arriving.popleft()
            q, k, v = self._arrived(part, exchange.wait())
            del exchange  # what was sent takes no memory during attention
            # A rank without heads calls ``inner`` too: a ring inside needs every rank, even one with nothing to send.
            leaving.append(self._to_tokens(part, inner(q, k, v)))
            del q, k, v
        batch, heads, tokens, head_dim = qkv[0].shape
        result = qkv[0].new_empty(batch, tokens, heads, head_dim)  # in the order that modules expect
        for part, exchange in zip(parts, leaving, strict=True):
            place(part, exchange.wait(), result)
        return result.transpose(1, 2)

    def _to_heads(self, heads: HeadSplit, qkv: QKV) -> _Exchange:
        """Start to exchange 3 x ``[B, heads, local tokens, D]`` for ``[tokens, B, local heads of q, k and v, D]``."""
        rank, (batch, _, local_tokens, head_dim) = self.axis.index, qkv[0].shape
        counts, width = [sum(each) for each in heads.counts], batch * head_dim
        send_sizes = [local_tokens * count * width for count in counts]
        sent = qkv[0].new_empty(sum(send_sizes))
        if heads.shared == 1:
            _pack_runs(heads, qkv, sent)
        else:
            for i, part in enumerate(sent.split(send_sizes)):
                _pack(heads, i, qkv, part.view(local_tokens, batch, counts[i], head_dim))
        received = sent.new_empty(self.tokens.total, batch, counts[rank], head_dim)
        receive_sizes = [size * counts[rank] * width for size in self.tokens.sizes]
        works = start_all_to_all(sent, send_sizes, received, receive_sizes, self.axis)
        return _Exchange(works=works, sent=sent, received=received)

    def _arrived(self, heads: HeadSplit, received: Tensor) -> list[Tensor]:
        """Return q, k and v ``[B, local heads, tokens, D]`` as views of what has arrived."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in received.split(heads.counts[self.axis.index], dim=2))
        repeats = heads.repeats[self.axis.index]
        return [q, _repeated(k, repeats), _repeated(v, repeats)]

    def _to_tokens(self, heads: HeadSplit, out: Tensor) -> _Exchange:
        """Start to exchange ``[B, local heads, tokens, D]`` for each rank's ``[local tokens, B, heads, D]``."""
        (batch, local_heads, _, head_dim), local_tokens = out.shape, self.tokens.sizes[self.axis.index]
        width = batch * head_dim
        sent = out.permute(2, 0, 1, 3).contiguous()
        receive_sizes = [local_tokens * size * width for size in heads.sizes]
        received = out.new_empty(sum(receive_sizes))
        send_sizes = [size * local_heads * width for size in self.tokens.sizes]
        works = start_all_to_all(sent, send_sizes, received, receive_sizes, self.axis)
        return _Exchange(works=works, sent=sent, received=received)


def _pack(heads: HeadSplit, rank: int, qkv: QKV, part: Tensor) -> None:
    """Copy the heads of q, k and v that a rank needs to ``part`` ``[local tokens, B, heads, D]``."""
    taken = heads.queries.slice(rank), heads.keys(rank), heads.keys(rank)
    for own, tensor, place in zip(part.split(heads.counts[rank], dim=2), qkv, taken, strict=True):
        own.copy_(tensor[:, place].permute(2, 0, 1, 3))


def _pack_runs(heads: HeadSplit, qkv: QKV, sent: Tensor) -> None:
    """Copy the heads of all ranks, one rank after another. If they divide, it is one copy for each of q, k and v."""
    batch, _, tokens, head_dim = qkv[0].shape
    for run, part in _of_runs(heads, sent, 3 * tokens * batch * head_dim):
        packed = part.view(run.ranks, tokens, batch, 3, run.each, head_dim)
        for j, tensor in enumerate(qkv):
            taken = tensor[:, run.heads].unflatten(1, (run.ranks, -1))[:, :, run.taken]
            packed[:, :, :, j].copy_(taken.permute(1, 3, 0, 2, 4))


def place(heads: HeadSplit, received: Tensor, result: Tensor) -> None:
    """Copy what each rank's heads have given for the local tokens to ``result`` ``[B, local tokens, heads, D]``."""
    batch, tokens, _, head_dim = result.shape
    for run, part in _of_runs(heads, received, tokens * batch * head_dim):
        packed = part.view(run.ranks, tokens, batch, run.each, head_dim)
        taken = result[:, :, run.heads].unflatten(2, (run.ranks, -1))[:, :, :, run.taken]
        taken.copy_(packed.permute(2, 1, 0, 3, 4))


def _of_runs(heads: HeadSplit, flat: Tensor, width: int) -> Iterator[tuple[Run, Tensor]]:
    """Yield each run of ranks with its part of the values, of which each head has ``width``."""
    sizes = [run.ranks * run.each * width for run in heads.runs]
    yield from zip(heads.runs, flat.split(sizes), strict=True)


def _repeated(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    """Repeat the heads of ``[B, heads, tokens, D]``; return the tensor itself if each stands once."""
    if all(count == 1 for count in repeats):
        return tensor
    heads = zip(tensor.split(1, dim=1), repeats, strict=True)
    return torch.cat([head.expand(-1, count, -1, -1) for head, count in heads], dim=1)
