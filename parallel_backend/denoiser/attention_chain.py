"""Putting the attention seam together for one row of a denoiser call: Ulysses outside, ring inside, a kernel inmost."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..attention.routing import Attention
from ..distributed.mesh import DeviceMesh
from ..layout.partition import Partition
from ..strategies.patch_attention import GatheredAttention, KeyValues, PatchAttention, PatchSplit
from ..strategies.ring import RingAttention
from ..strategies.token_split import TokenSplit
from ..strategies.ulysses import UlyssesAttention


class LocalAttention:
    """Attention to keys that are all here."""

    def __init__(self, kernel: Kernel, kept: KeyMask | None) -> None:
        self.kernel, self.kept = kernel, kept

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """See ``Attention``."""
        if not query.numel():
            return query
        return attend(self.kernel, (query, key, value), scale=scale, kept=self.kept, sample=sample)


class WithoutPadding:
    """Leaves rows out that are nobody's tokens.

    A module that cuts text off the end by a negative index, or reshapes it by one, needs at least one row of it, which
    a rank without text makes up.

    Args:
        sizes: own tokens of each stream, in the order of the module's own concatenation. The rows made up lie where
            the last stream without tokens has its place.
    """

    def __init__(self, sizes: Sequence[int], inner: Attention) -> None:
        self.tokens, self.inner = sum(sizes), inner
        empty = [i for i, size in enumerate(sizes) if not size]
        self.place = sum(sizes[: empty[-1]]) if empty else self.tokens

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """See ``Attention``; the rows left out get zeros."""
        spare = query.shape[2] - self.tokens
        if not spare:
            return self.inner(query, key, value, scale=scale, sample=sample)
        sizes = (self.place, spare, self.tokens - self.place)
        q, k, v = (torch.cat(tensor.split(sizes, dim=2)[::2], dim=2) for tensor in (query, key, value))
        before, after = self.inner(q, k, v, scale=scale, sample=sample).split(sizes[::2], dim=2)
        return torch.cat([before, torch.zeros_like(query[:, :, :spare]), after], dim=2)


def attention(
    mesh: DeviceMesh, split: TokenSplit, streams: Sequence[str], masks: Mapping[str, Tensor], kernel: Kernel
) -> Attention:
    """The seam of a module whose attention is over ``streams``."""
    ulysses, shown = mesh.axes["ulysses"].size, split.masks(masks, streams)
    blocks = _blocks(split.tokens(streams), ulysses)
    shown_by_block = [shown[i : i + ulysses] for i in range(0, split.axis.size, ulysses)] if shown else []
    kept = [KeyMask.of(torch.cat(block, dim=1)) for block in shown_by_block] or [None] * len(blocks)
    inner: Attention = LocalAttention(kernel, kept[0])
    if len(blocks) > 1:
        inner = RingAttention(mesh.axes["ring"], [block.total for block in blocks], kept, kernel)
    return around(mesh, split, streams, inner)


def patch_attention(
    mesh: DeviceMesh,
    split: PatchSplit,
    patch: int | None,
    streams: Sequence[str],
    kept: KeyMask | None,
    kernel: Kernel,
    memory: KeyValues,
) -> Attention:
    """The seam of a module that keeps the whole row's keys and values, for a patch of it; None for all patches.

    ``kept`` is what ``whole_row`` says of the whole row.
    """
    part = split.whole if patch is None else split.each[patch]
    places = None if patch is None else split.places(patch, streams)
    inner: Attention = PatchAttention(memory, places, kept, kernel)
    ring = mesh.axes["ring"]
    if ring.size > 1:
        inner = GatheredAttention(ring, tokens_by_place(mesh, part, streams), inner)
    return around(mesh, part, streams, inner)


def around(mesh: DeviceMesh, split: TokenSplit, streams: Sequence[str], inner: Attention) -> Attention:
    """Ulysses around what attends to the tokens of the own place on the ring."""
    ulysses = mesh.axes["ulysses"]
    if ulysses.size > 1:
        blocks = _blocks(split.tokens(streams), ulysses.size)
        inner = UlyssesAttention(ulysses, blocks[split.axis.index // ulysses.size], inner)
    return WithoutPadding([split.streams[name].sizes[split.axis.index] for name in streams], inner)


def whole_row(split: TokenSplit, streams: Sequence[str], masks: Mapping[str, Tensor]) -> KeyMask | None:
    """Which tokens of all ranks may be attended."""
    shown = split.masks(masks, streams)
    return KeyMask.of(torch.cat(shown, dim=1)) if shown else None


def tokens_by_place(mesh: DeviceMesh, split: TokenSplit, streams: Sequence[str]) -> list[int]:
    """The tokens of each place on the ring."""
    return [block.total for block in _blocks(split.tokens(streams), mesh.axes["ulysses"].size)]


def _blocks(tokens: Partition, ulysses: int) -> list[Partition]:
    """The tokens by rank, of each place on the ring."""
    return [Partition(tokens.sizes[i : i + ulysses]) for i in range(0, len(tokens.sizes), ulysses)]
