"""Patches of a latent that are computed one after the other, with keys and values of the others kept from before.

As in PipeFusion (https://arxiv.org/abs/2405.14430): attention of a patch is over the whole row, of which the patch's
own keys and values are new, and those of patches that this step has not come to yet are of the step before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.key_masks import KeyMask, attend
from ..attention.routing import Attention
from ..distributed.collectives import all_gather
from ..distributed.mesh import Axis
from ..interfaces.geometry import IMAGE
from ..layout.partition import Partition
from .token_split import StreamPartition, TokenSplit


@dataclass(frozen=True, kw_only=True)
class PatchSplit:
    """How a row is cut into patches, and each of them over the ranks of a sequence.

    ``each`` is by patch, ``whole`` all patches together.
    """

    each: tuple[TokenSplit, ...]
    whole: TokenSplit

    @classmethod
    def of(cls, lengths: Mapping[str, int], image: Partition, axis: Axis) -> "PatchSplit":
        """Cut streams of these lengths; of the image stream what ``image`` leaves goes to the last patch."""
        each = []
        for i, (start, size) in enumerate(zip(image.offsets, image.sizes, strict=True)):
            rest = lengths[IMAGE] - image.total if i == len(image.sizes) - 1 else 0
            streams = {name: StreamPartition.even(0, 0 if i else length, axis.size) for name, length in lengths.items()}
            each.append(
                TokenSplit(axis=axis, streams={**streams, IMAGE: StreamPartition.even(start, size + rest, axis.size)})
            )
        whole = {
            name: StreamPartition(tuple(patch for split in each for patch in split.streams[name].patches))
            for name in lengths
        }
        return cls(each=tuple(each), whole=TokenSplit(axis=axis, streams=whole))

    def places(self, patch: int, streams: Sequence[str]) -> list[slice]:
        """Where the tokens of a patch lie among those of the whole row, both as attention over ``streams`` has them."""
        places, start = [], 0
        for rank in range(self.whole.axis.size):
            for name in streams:
                for i, split in enumerate(self.each):
                    size = split.streams[name].sizes[rank]
                    if i == patch and size:
                        places.append(slice(start, start + size))
                    start += size
        return places


@dataclass(frozen=True, kw_only=True)
class KeyValues:
    """Keys and values of a module's whole row, ``[B, heads, tokens, head_dim]``, by the sample that they are of."""

    found: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)


class PatchAttention:
    """Attention of a patch's queries to the whole row.

    Args:
        memory: of the module; a whole row fills it anew.
        places: of the patch in the row; None for the whole of it.
    """

    def __init__(self, memory: KeyValues, places: Sequence[slice] | None, kept: KeyMask | None, kernel: Kernel) -> None:
        self.memory, self.places, self.kept, self.kernel = memory, places, kept, kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, tokens of the patch, head_dim]``; see ``Attention``."""
        if self.places is None:
            self.memory.found[sample] = (_copied(key), _copied(value))
        whole = self.memory.found[sample]
        if self.places is not None:
            sizes = [place.stop - place.start for place in self.places]
            for kept, new in zip(whole, (key, value), strict=True):
                for place, part in zip(self.places, new.split(sizes, dim=2), strict=True):
                    kept[:, :, place].copy_(part)
        if not query.numel():
            return query
        return attend(self.kernel, (query, *whole), scale=scale, kept=self.kept, sample=sample)


class GatheredAttention:
    """Keys and values of all ranks of a ring, which keep them, come together before the attention.

    Args:
        sizes: tokens by rank.
    """

    def __init__(self, axis: Axis, sizes: Sequence[int], inner: Attention) -> None:
        self.axis, self.sizes, self.inner = axis, sizes, inner

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, sample: int | None) -> Tensor:
        """``[B, heads, own tokens, head_dim]``; see ``Attention``."""
        own = torch.stack((key, value)).transpose(2, 3)
        whole = all_gather(own, [(*own.shape[:2], size, *own.shape[3:]) for size in self.sizes], self.axis)
        k, v = torch.cat(whole, dim=2).transpose(2, 3)
        return self.inner(query, k, v, scale=scale, sample=sample)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
