"""Attention of patches that are computed one after another, with cached keys and values of the other patches.

As in PipeFusion (https://arxiv.org/abs/2405.14430), a patch attends to the whole row. The keys and values of the patch
itself are current; patches that the current step has not reached yet have theirs of the previous step. Approximate.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..attention.routing import Attention
from ..distributed.collectives import all_gather
from ..distributed.mesh import Axis
from ..interfaces.patch_plan import joined, streams_by_patch
from ..layout.partition import Partition
from .token_split import TokenSplit


@dataclass(frozen=True, kw_only=True)
class PatchSplit:
    """How a row is cut into patches, and how each patch is split over the ranks of the sequence.

    Attributes:
        each: the split of each patch.
        whole: the split of all patches together.
    """

    each: tuple[TokenSplit, ...]
    whole: TokenSplit

    @classmethod
    def of(cls, lengths: Mapping[str, int], image: Partition, axis: Axis, whole: Collection[str] = ()) -> "PatchSplit":
        """Cut a row into patches.

        Args:
            lengths: number of tokens of each stream. All streams but the image belong to the first patch.
            image: image tokens by patch. Image tokens beyond its total belong to the last patch.
            axis: the ranks.
            whole: streams that every rank holds whole. Then there is a single patch.
        """
        assert not whole or len(image.sizes) == 1, "a whole stream is not cut into patches"
        patches = streams_by_patch(lengths, image, axis.size)
        return cls(
            each=tuple(TokenSplit(axis=axis, streams=streams) for streams in patches),
            whole=TokenSplit(axis=axis, streams=joined(patches), whole=frozenset(whole)),
        )

    def places(self, patch: int, streams: Sequence[str]) -> list[slice]:
        """Return where a patch's tokens are in the whole row.

        Both are in the order in which attention over ``streams`` has them: by rank, then by stream, then by patch.
        """
        slices, start = [], 0
        for rank in range(self.whole.axis.size):
            for name in streams:
                for i, split in enumerate(self.each):
                    size = split.streams[name].sizes[rank]
                    if i == patch and size:
                        slices.append(slice(start, start + size))
                    start += size
        return slices


@dataclass(frozen=True, kw_only=True)
class KeyValues:
    """A module's cached keys and values of the whole row.

    Attributes:
        by_sample: keys and values, ``[B, heads, tokens, head_dim]`` each, by sample; None if they are of all samples
            at once.
    """

    by_sample: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)


class PatchAttention:
    """Attention of one patch's queries to the whole row.

    Args:
        cache: the module's keys and values. A call with the whole row refills it.
        slices: where the patch's tokens are in the row; None if the patch is the whole row.
        key_mask: the keys of the whole row that may be attended to; None for all.
    """

    def __init__(
        self, cache: KeyValues, slices: Sequence[slice] | None, key_mask: KeyMask | None, kernel: Kernel
    ) -> None:
        self.cache, self.slices, self.key_mask, self.kernel = cache, slices, key_mask, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, tokens of the patch, head_dim]``; see ``Attention``."""
        if self.slices is None:
            self.cache.by_sample[sample] = (_copied(key), _copied(value))
        cached = self.cache.by_sample[sample]
        if self.slices is not None:
            sizes = [part.stop - part.start for part in self.slices]
            for whole, current in zip(cached, (key, value), strict=True):
                for part, tokens in zip(self.slices, current.split(sizes, dim=2), strict=True):
                    whole[:, :, part].copy_(tokens)
        if not query.numel():
            return query
        return attend(self.kernel, (query, *cached), scale=scale, key_mask=self.key_mask, sample=sample)


class GatheredAttention:
    """Gathers the keys and values of all ranks of a ring before attention, so that each rank can cache them.

    Args:
        sizes: number of tokens of each rank.
        inner: attends with the gathered keys and values.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int], inner: Attention) -> None:
        self.axis, self.sizes, self.inner = axis, sizes, inner

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, local tokens, head_dim]``; see ``Attention``."""
        local = torch.stack((key, value)).transpose(2, 3)
        shapes = [(*local.shape[:2], size, *local.shape[3:]) for size in self.sizes]
        k, v = torch.cat(all_gather(local, shapes, self.axis), dim=2).transpose(2, 3)
        return self.inner(query, k, v, scale=scale, sample=sample)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
