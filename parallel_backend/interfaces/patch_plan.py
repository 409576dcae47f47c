"""How many patches a pipeline streams, which tokens each patch has, and which of them each rank."""

from collections.abc import Mapping, Sequence

from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from ..layout.stream_partition import StreamPartition
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


def streams_by_patch(lengths: Mapping[str, int], image: Partition, ranks: int) -> list[dict[str, StreamPartition]]:
    """Cut a row into patches, and split each over ranks.

    Args:
        lengths: number of tokens of each stream. All streams but the image belong to the first patch.
        image: image tokens by patch. Image tokens beyond its total belong to the last patch.
        ranks: number of ranks of the sequence, which share each patch evenly.
    """
    patches, last = [], len(image.sizes) - 1
    for i, (start, size) in enumerate(zip(image.offsets, image.sizes, strict=True)):
        rest = lengths[IMAGE] - image.total if i == last else 0
        streams = {name: StreamPartition.even(0, 0 if i else length, ranks) for name, length in lengths.items()}
        patches.append({**streams, IMAGE: StreamPartition.even(start, size + rest, ranks)})
    return patches


def joined(patches: Sequence[Mapping[str, StreamPartition]]) -> dict[str, StreamPartition]:
    """Return how all patches together are split, by stream."""
    return {
        name: StreamPartition(tuple(patch for streams in patches for patch in streams[name].patches))
        for name in patches[0]
    }
