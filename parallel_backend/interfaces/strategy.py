"""``Strategy``: a way to split work over ranks, and ``Workload``: the numbers of a request that it decides by."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..layout.head_split import HeadSplit
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..layout.stream_partition import StreamPartition
from .geometry import BIAS_CHANNELS, AttentionKind, Extent, Geometry
from .patch_plan import image_patches, joined, patch_count, streams_by_patch

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
        groups = Split.of(layout).cut_heads(site.groups).sizes[place["tensor"]]
        return Split.of(layout).heads(groups * (site.heads // site.groups), groups)

    @staticmethod
    def head_dim(site: AttentionKind, extent: Extent) -> int:
        """Return the features of a head that are sent, with the channels of biases."""
        return site.head_dim + (BIAS_CHANNELS if site.biased and extent.biased else 0)

    def tokens_by_rank(self, layout: ParallelLayout, extent: Extent, stream: str) -> tuple[int, ...]:
        """Return the number of tokens of a stream that each rank of the sequence holds inside the blocks."""
        if stream in extent.whole:
            return (extent.streams[stream],) * layout.sequence
        return self._streams(layout, extent)[stream].sizes

    def predicted_by_rank(self, layout: ParallelLayout, extent: Extent) -> tuple[int, ...]:
        """Return the number of tokens that each rank of the sequence predicts."""
        by_stream = [self._streams(layout, extent)[name].sizes for name in extent.predicted]
        return tuple(map(sum, zip(*by_stream, strict=True)))

    def _streams(self, layout: ParallelLayout, extent: Extent) -> dict[str, StreamPartition]:
        """Split the streams of a row over the ranks of the sequence."""
        if not self.guided or layout.pipe == 1:
            return Split.of(layout).streams(extent.streams)
        extents = [extent for _, extent in self.branches]
        patches = image_patches(extents, patch_count(layout, extents))
        return joined(streams_by_patch(extent.streams, patches, layout.sequence))

    def local_branches(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[int, Extent]]:
        """Yield (samples, extent) of each branch that the ranks at ``place`` compute."""
        for samples, extent in self.branches[self._own(layout, place)]:
            yield Split.of(layout).samples(samples).sizes[place["data"]], extent

    def batches(self, layout: ParallelLayout, place: Mapping[str, int]) -> dict[Hashable, tuple[int, Extent]]:
        """Return (samples, extent) of each batch that the ranks at ``place`` run, by the key of its branches."""
        batches: dict[Hashable, tuple[int, Extent]] = {}
        for key, (samples, extent) in zip(
            self.alike[self._own(layout, place)], self.local_branches(layout, place), strict=True
        ):
            before, _ = batches.get(key, (0, extent))
            batches[key] = before + samples, extent
        return batches

    def forwards(self, layout: ParallelLayout, place: Mapping[str, int]) -> int:
        """Return the number of forwards that the ranks at ``place`` run."""
        return sum(samples > 0 for samples, _ in self.batches(layout, place).values())

    def _own(self, layout: ParallelLayout, place: Mapping[str, int]) -> slice:
        return Split.of(layout).branches(len(self.branches)).slice(place["cfg"])


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
