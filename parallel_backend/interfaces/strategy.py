"""``Strategy``: a way to split work over ranks, and ``Workload``: the numbers of a request that it decides by."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..layout.head_split import HeadSplit
from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .geometry import BIAS_CHANNELS, IMAGE, AttentionKind, Extent, Geometry
from .patch_plan import image_patches, patch_count

ParameterShapes = tuple[tuple[tuple[int, ...], int], ...]
"""Shape of each parameter and bytes per value."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The static numbers of a request, known before any weight is loaded.

    Methods take ``place``, the coordinates of a group of ranks by mesh axis.

    Attributes:
        branches: per branch, the number of samples and the extent of one sample.
        alike: per branch, a key. A rank runs its branches with equal keys as one forward.
        geometry: the static numbers of the model.
        itemsize: bytes of a value in the model's dtype.
        guided: True in a step loop, where all ranks of the sequence need the guided prediction. False for a single
            forward, where only rank 0 needs the predictions of all branches.
        parameters: all parameters of the blocks, for the bytes that weight sharding sends.
        latent: values in the latent of one sample.
        stages: per pipeline stage, how many layers of each ``geometry.sites`` it holds, for the bytes that attention
            sends.
    """

    branches: tuple[tuple[int, Extent], ...]
    alike: tuple[Hashable, ...]
    geometry: Geometry
    itemsize: int
    guided: bool
    parameters: ParameterShapes = ()
    latent: int = 0
    stages: tuple[tuple[int, ...], ...] = ()

    def sites(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[AttentionKind, int]]:
        """Yield each kind of attention, and how many layers of it the ranks at ``place`` run in a forward."""
        counts = self.stages[place["pipe"]] if layout.pipe > 1 else [site.count for site in self.geometry.sites]
        return zip(self.geometry.sites, counts, strict=True)

    def row_sites(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[AttentionKind, int]]:
        """Yield what ``sites`` yields of attention in which tokens of split streams attend to one another."""
        return ((site, count) for site, count in self.sites(layout, place) if site.queries is None)

    def heads(self, layout: ParallelLayout, site: AttentionKind, place: Mapping[str, int]) -> HeadSplit:
        """Return how Ulysses splits the heads that the ranks at ``place`` have outside of its attention.

        Tensor parallelism cuts whole groups of query heads, Ulysses single query heads.
        """
        groups = Partition.even(site.groups, layout.tensor).sizes[place["tensor"]]
        return HeadSplit.even(groups * (site.heads // site.groups), groups, layout.ulysses)

    @staticmethod
    def head_dim(site: AttentionKind, extent: Extent) -> int:
        """Return the features of a head that are sent, with the channels of biases."""
        return site.head_dim + (BIAS_CHANNELS if site.biased and extent.biased else 0)

    def tokens_by_rank(self, layout: ParallelLayout, extent: Extent, stream: str) -> tuple[int, ...]:
        """Return the number of tokens of a stream that each rank of the sequence holds inside the blocks.

        Without ``layout.balance`` all ranks count as equally fast, even where a layout adapts to measured speeds.
        """
        if stream in extent.whole:
            return (extent.streams[stream],) * layout.sequence
        return self._shares(layout, extent, stream)

    def predicted_by_rank(self, layout: ParallelLayout, extent: Extent) -> tuple[int, ...]:
        """Return the number of tokens that each rank of the sequence predicts."""
        by_stream = [self._shares(layout, extent, name) for name in extent.predicted]
        return tuple(map(sum, zip(*by_stream, strict=True)))

    def _shares(self, layout: ParallelLayout, extent: Extent, stream: str) -> tuple[int, ...]:
        length, ranks = extent.streams[stream], layout.sequence
        if layout.stale and layout.balance:
            weights = [speed for speed in layout.balance for _ in range(layout.ulysses)]
            return Partition.weighted(length, weights).sizes
        if stream != IMAGE or not self.guided or layout.pipe == 1:
            return Partition.even(length, ranks).sizes
        extents = [extent for _, extent in self.branches]
        *patches, _ = image_patches(extents, patch_count(layout, extents)).sizes
        by_patch = [Partition.even(size, ranks).sizes for size in (*patches, length - sum(patches))]
        return tuple(map(sum, zip(*by_patch, strict=True)))

    def local_branches(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[int, Extent]]:
        """Yield (samples, extent) of each branch that the ranks at ``place`` compute."""
        for samples, extent in self.branches[Partition.even(len(self.branches), layout.cfg).slice(place["cfg"])]:
            yield Partition.even(samples, layout.data).sizes[place["data"]], extent

    def forwards(self, layout: ParallelLayout, place: Mapping[str, int]) -> int:
        """Return the number of forwards that the ranks at ``place`` run."""
        local_branches = Partition.even(len(self.branches), layout.cfg).slice(place["cfg"])
        batches = [samples for samples, _ in self.local_branches(layout, place)]
        return len({key for key, samples in zip(self.alike[local_branches], batches, strict=True) if samples})


class Strategy(Protocol):
    """A way to split the work over one or more axes of the mesh."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the strategy uses."""

    def check(self, layout: ParallelLayout, workload: Workload) -> None:
        """Refuse a layout that cannot work for this workload.

        Raises:
            InvalidRequest: the layout cannot work. The sentence names the reason. The caller adds layouts that would
                work, because it knows all strategies.
        """

    def bytes_sent(self, layout: ParallelLayout, workload: Workload, rank: int) -> int:
        """Return the bytes that ``rank`` sends to other ranks in one denoiser call."""
