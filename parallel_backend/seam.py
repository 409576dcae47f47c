"""Putting the attention seam together for one row of a denoiser call: Ulysses outside, ring inside, a kernel inmost."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .attention import Attention
from .kernels import Kernel
from .masks import Kept, attend
from .mesh import DeviceMesh
from .partition import Partition
from .strategies.ring import RingAttention
from .strategies.sequence import TokenSplit
from .strategies.ulysses import UlyssesAttention


class Local:
    """Attention to keys that are all here."""

    def __init__(self, kernel: Kernel, kept: Kept | None) -> None:
        self.kernel, self.kept = kernel, kept

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """See ``Attention``."""
        if not query.numel():
            return query
        return attend(self.kernel, (query, key, value), scale=scale, kept=self.kept, sample=sample)


class OwnTokens:
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
    tokens, shown = split.tokens(streams), split.masks(masks, streams)
    ulysses, ring = mesh.axes["ulysses"], mesh.axes["ring"]
    turns = [slice(i, i + ulysses.size) for i in range(0, split.axis.size, ulysses.size)]
    blocks = [Partition(tokens.sizes[turn]) for turn in turns]
    kept = [Kept.of(torch.cat(shown[turn], dim=1)) if shown else None for turn in turns]
    inner: Attention = Local(kernel, kept[0])
    if ring.size > 1:
        inner = RingAttention(ring, [block.total for block in blocks], kept, kernel)
    if ulysses.size > 1:
        inner = UlyssesAttention(ulysses, blocks[ring.index], inner)
    return OwnTokens([split.streams[name].sizes[split.axis.index] for name in streams], inner)
