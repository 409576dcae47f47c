"""Build the attention of one row of a denoiser call: Ulysses outside, ring inside, a kernel innermost.

A row is one branch of one sample. Each function returns a callable that a module's attention is routed to.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..attention.pair_biases import PairBiases
from ..attention.routing import Attention
from ..distributed.collectives import concat
from ..distributed.mesh import RankMesh
from ..distributed.trials import RowTrials, Trials
from ..interfaces.state import BIASES, State
from ..layout.partition import Partition
from ..strategies.patch_attention import GatheredAttention, KeyValues, PatchAttention, PatchSplit
from ..strategies.ring import RingAttention
from ..strategies.token_split import TokenSplit
from ..strategies.ulysses import UlyssesAttention
from ..strategies.whole_queries import WholeQueriesAttention


class LocalAttention:
    """Attention over keys that are all on this rank.

    Where some are masked, it changes the order of the keys and values that it gets. The calling module still holds
    these but does not read them again.
    """

    def __init__(self, kernel: Kernel, key_mask: KeyMask | None) -> None:
        self.kernel, self.key_mask = kernel, key_mask

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        if not query.numel():
            return query
        if self.key_mask is None:
            return self.kernel(query, key, value, scale)
        self.key_mask.move(key, value, sample)
        return attend(self.kernel, (query, key, value), scale=scale, key_mask=self.key_mask, sample=sample, moved=True)


class WithoutPadding:
    """Remove padding rows before attention and put zeros in their place afterwards.

    Some modules cut text off with a negative index, or reshape by it, and so need at least one text row. A rank
    that holds no text gives them a padding row, which must not reach the attention of other tokens.

    Args:
        sizes: this rank's tokens of each stream, in the order in which the module concatenates them. Padding rows
            lie where the last empty stream would be.
    """

    def __init__(self, sizes: Sequence[int], inner: Attention) -> None:
        self.tokens, self.inner = sum(sizes), inner
        empty = [i for i, size in enumerate(sizes) if not size]
        self.padding_start = sum(sizes[: empty[-1]]) if empty else self.tokens

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """Padding rows of the output are zero."""
        padding = query.shape[2] - self.tokens
        if not padding:
            return self.inner(query, key, value, scale=scale, sample=sample)
        sizes = (self.padding_start, padding, self.tokens - self.padding_start)
        q, k, v = (torch.cat(tensor.split(sizes, dim=2)[::2], dim=2) for tensor in (query, key, value))
        before, after = self.inner(q, k, v, scale=scale, sample=sample).split(sizes[::2], dim=2)
        return torch.cat([before, torch.zeros_like(query[:, :, :padding]), after], dim=2)


def without_repeats(inner: Attention, repeats: int) -> Attention:
    """Give ``inner`` one of every ``repeats`` successive heads of the keys and values, which are equal."""

    def attend_once(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        return inner(query, key[:, ::repeats], value[:, ::repeats], scale=scale, sample=sample)

    return attend_once if repeats > 1 else inner


def with_own_values(inner: Attention) -> Attention:
    """Give ``inner`` values of its own, which it may change."""

    def attend_to_copies(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None
    ) -> Tensor:
        return inner(query, key, value.clone(), scale=scale, sample=sample)

    return attend_to_copies


def attention(
    mesh: RankMesh,
    split: TokenSplit,
    streams: Sequence[str],
    masks: Mapping[str, Tensor],
    kernel: Kernel,
    trials: Trials | None = None,
) -> Attention:
    """Exact attention over all tokens of ``streams``, on all ranks of the sequence."""
    ulysses = mesh.axes["ulysses"].size
    blocks = _ring_blocks(split.tokens(streams), ulysses)
    key_masks = _key_masks(split, streams, masks, ulysses) or [None] * len(blocks)
    inner: Attention = LocalAttention(kernel, key_masks[0])
    if len(blocks) > 1:
        inner = RingAttention(mesh.axes["ring"], [block.total for block in blocks], key_masks, kernel)
    kind, tokens = (tuple(streams), type(kernel)), split.tokens(streams).total
    row = RowTrials(trials=trials, axis=split.axis, tokens=tokens, kind=kind) if trials else None
    return with_ulysses(mesh, split, streams, inner, row)


def with_biases(inner: Attention, state: State, streams: Sequence[str]) -> Attention:
    """Add the biases of pairs that the tables of this rank's tokens have."""
    queries, keys = (concat([state.tables[name][kind] for name in streams], dim=1) for kind in BIASES)
    return PairBiases(inner, queries, keys)


def whole_queries(
    mesh: RankMesh, split: TokenSplit, streams: Sequence[str], masks: Mapping[str, Tensor], kernel: Kernel
) -> Attention:
    """Exact attention of queries that every rank holds whole to all tokens of ``streams``, on all ranks."""
    axis = split.axis
    key_masks = _key_masks(split, streams, masks, 1) or [None] * axis.size
    if axis.size == 1:
        return LocalAttention(kernel, key_masks[0])
    keys = sum(split.held(name) for name in streams)
    return WholeQueriesAttention(axis, mesh.split, keys, key_masks[axis.index], kernel)


def patch_attention(
    mesh: RankMesh,
    split: PatchSplit,
    patch: int | None,
    streams: Sequence[str],
    key_mask: KeyMask | None,
    kernel: Kernel,
    cache: KeyValues,
) -> Attention:
    """Attention of one patch's queries over the whole row, whose keys and values ``cache`` keeps.

    Args:
        patch: index of the patch, or None for all patches at once, which fills the cache.
    """
    part = split.whole if patch is None else split.each[patch]
    places = None if patch is None else split.places(patch, streams)
    inner: Attention = PatchAttention(cache, places, key_mask, kernel)
    ring = mesh.axes["ring"]
    if ring.size > 1:
        inner = GatheredAttention(ring, tokens_by_ring_rank(mesh, part, streams), inner)
    return with_ulysses(mesh, part, streams, inner)


def with_ulysses(
    mesh: RankMesh, split: TokenSplit, streams: Sequence[str], inner: Attention, trials: RowTrials | None = None
) -> Attention:
    """Exchange tokens for heads around ``inner``, which attends to the tokens of this rank's place on the ring."""
    ulysses = mesh.axes["ulysses"]
    if ulysses.size > 1:
        blocks = _ring_blocks(split.tokens(streams), ulysses.size)
        inner = UlyssesAttention(ulysses, blocks[split.axis.index // ulysses.size], mesh.split, inner, trials)
    return WithoutPadding([split.held(name) for name in streams], inner)


def row_mask(split: TokenSplit, streams: Sequence[str], masks: Mapping[str, Tensor]) -> KeyMask | None:
    """Which tokens of the whole row, on all ranks, may be attended to; None if all may be."""
    (mask,) = _key_masks(split, streams, masks, split.axis.size) or [None]
    return mask


def tokens_by_ring_rank(mesh: RankMesh, split: TokenSplit, streams: Sequence[str]) -> list[int]:
    """Number of tokens at each place on the ring."""
    return [block.total for block in _ring_blocks(split.tokens(streams), mesh.axes["ulysses"].size)]


def _key_masks(
    split: TokenSplit, streams: Sequence[str], masks: Mapping[str, Tensor], ranks: int
) -> list[KeyMask | None]:
    """The tokens of each ``ranks`` successive ranks that may be attended to; empty if no stream has a mask.

    The masks are copied to the CPU once, since the host would wait for a GPU for each number that it reads there.
    """
    devices = [masks[name].device for name in streams if name in masks]
    by_rank = split.masks({name: masks[name].cpu() for name in streams if name in masks}, streams) or []
    starts = range(0, len(by_rank), ranks)
    return [KeyMask.of(torch.cat(by_rank[start : start + ranks], dim=1), devices[0]) for start in starts]


def _ring_blocks(tokens: Partition, ulysses: int) -> list[Partition]:
    """The tokens at each place on the ring, split over the ranks of its Ulysses group."""
    return [Partition(tokens.sizes[i : i + ulysses]) for i in range(0, len(tokens.sizes), ulysses)]
