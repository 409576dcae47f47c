"""How many patches a pipeline streams, and which image tokens each patch has."""

from collections.abc import Sequence

from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .geometry import IMAGE, Extent


def patch_count(layout: ParallelLayout, extents: Sequence[Extent]) -> int:
    """Return ``layout.patches`` if it is set, otherwise two patches per stage, but at most one per image token.

    Several predicted streams are one patch.
    """
    if not layout.patches and len(extents[0].predicted) > 1:
        return 1
    return layout.patches or min(2 * layout.pipe, min(extent.streams[IMAGE] for extent in extents))


def image_patches(extents: Sequence[Extent], count: int) -> Partition:
    """Cut the image tokens that all branches share into ``count`` patches of at least one token.

    Text travels with the first patch, and tokens of reference images with the last. These two patches get fewer tokens
    of the latent, so that all patches take about equally long.
    """
    tokens = min(extent.streams[IMAGE] for extent in extents)
    extra_tokens = [0] * count
    extra_tokens[0] += max(sum(extent.streams.values()) - extent.streams[IMAGE] for extent in extents)
    extra_tokens[-1] += max(extent.streams[IMAGE] for extent in extents) - tokens
    even_sizes = Partition.even(tokens + sum(extra_tokens), count).sizes
    weights = [max(0, size - extra - 1) for size, extra in zip(even_sizes, extra_tokens, strict=True)]
    spare = Partition.weighted(tokens - count, weights) if any(weights) else Partition.even(tokens - count, count)
    return Partition(tuple(1 + size for size in spare.sizes))
