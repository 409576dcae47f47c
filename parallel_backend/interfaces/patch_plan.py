"""How many patches a pipeline streams, and which image tokens each has."""

from collections.abc import Sequence

from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .geometry import IMAGE, Extent


def count(layout: ParallelLayout, extents: Sequence[Extent]) -> int:
    """Patches that a layout with stages streams: as many as it says, else two a stage, if there are enough tokens."""
    return layout.patches or min(2 * layout.pipe, min(extent.streams[IMAGE] for extent in extents))


def cut(extents: Sequence[Extent], count: int) -> Partition:
    """The image tokens that all branches have, by patch: one at least each.

    Text rides with the first patch and what follows the latent's own tokens with the last one, which are so much
    smaller where they can be.
    """
    tokens = min(extent.streams[IMAGE] for extent in extents)
    riders = [0] * count
    riders[0] += max(sum(extent.streams.values()) - extent.streams[IMAGE] for extent in extents)
    riders[-1] += max(extent.streams[IMAGE] for extent in extents) - tokens
    shares = Partition.even(tokens + sum(riders), count).sizes
    weights = [max(0, share - rider - 1) for share, rider in zip(shares, riders, strict=True)]
    spare = Partition.weighted(tokens - count, weights) if any(weights) else Partition.even(tokens - count, count)
    return Partition(tuple(1 + size for size in spare.sizes))
