"""What every strategy says of itself."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..layout.parallel_layout import ParallelLayout
from ..layout.partition import Partition
from .geometry import IMAGE, Extent, Geometry, Site
from .patch_plan import count, cut

Parameters = tuple[tuple[tuple[int, ...], int], ...]
"""Shape and bytes a value of each."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The static numbers of a request, known before any weight is loaded.

    Attributes:
        branches: by branch the samples and what one of them comes to.
        geometry: the model's numbers.
        itemsize: of the model's dtype, in bytes.
        alike: by branch a key; branches with the same one run as one forward where a rank has both.
        parameters: all of the blocks, for those who ask what sharing them sends.
        latent: values of a sample's latent.
        stages: by stage of a pipeline how often each of the geometry's sites is in it; for those who ask what it sends.
        guided: whether the ranks of the sequence need the guided prediction (in a step loop), or rank 0 alone needs
            all branches' predictions.
    """

    branches: tuple[tuple[int, Extent], ...]
    alike: tuple[Hashable, ...]
    geometry: Geometry
    itemsize: int
    guided: bool
    parameters: Parameters = ()
    latent: int = 0
    stages: tuple[tuple[int, ...], ...] = ()

    def sites(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[Site, int]]:
        """The attention that the ranks at ``place`` run, and how often in a forward."""
        counts = self.stages[place["pipe"]] if layout.pipe > 1 else [site.count for site in self.geometry.sites]
        return zip(self.geometry.sites, counts, strict=True)

    def heads(self, layout: ParallelLayout, site: Site, place: Mapping[str, int]) -> tuple[int, int]:
        """The heads of a site that the ranks at ``place`` have: outside of the attention of Ulysses, and inside."""
        outside = Partition.even(site.heads, layout.tensor).sizes[place["tensor"]]
        return outside, Partition.even(outside, layout.ulysses).sizes[place["ulysses"]]

    def sizes(self, layout: ParallelLayout, extent: Extent, stream: str) -> tuple[int, ...]:
        """The tokens of a stream by rank of the sequence; where speeds are measured, as if they were equal."""
        length, ranks = extent.streams[stream], layout.sequence
        if layout.stale and layout.balance:
            weights = [speed for speed in layout.balance for _ in range(layout.ulysses)]
            return Partition.weighted(length, weights).sizes
        if stream != IMAGE or not self.guided or layout.pipe == 1:
            return Partition.even(length, ranks).sizes
        extents = [extent for _, extent in self.branches]
        *patches, _ = cut(extents, count(layout, extents)).sizes
        cuts = [Partition.even(size, ranks).sizes for size in (*patches, length - sum(patches))]
        return tuple(map(sum, zip(*cuts, strict=True)))

    def own(self, layout: ParallelLayout, place: Mapping[str, int]) -> Iterator[tuple[int, Extent]]:
        """The samples and the extent of each branch that the ranks at ``place`` compute."""
        for samples, extent in self.branches[Partition.even(len(self.branches), layout.cfg).slice(place["cfg"])]:
            yield Partition.even(samples, layout.data).sizes[place["data"]], extent

    def forwards(self, layout: ParallelLayout, place: Mapping[str, int]) -> int:
        """How many forwards the ranks at ``place`` run."""
        own = Partition.even(len(self.branches), layout.cfg).slice(place["cfg"])
        rows = [samples for samples, _ in self.own(layout, place)]
        return len({key for key, samples in zip(self.alike[own], rows, strict=True) if samples})


class Strategy(Protocol):
    """A way to split the work over one or more axes of the mesh."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the strategy uses."""

    def check(self, layout: ParallelLayout, job: Workload) -> None:
        """Refuse a layout that cannot work for the job.

        Raises:
            InvalidRequest: names the reason; what would work is for the caller to say, who knows all strategies.
        """

    def bytes_sent(self, layout: ParallelLayout, job: Workload, rank: int) -> int:
        """Bytes that ``rank`` sends to others in one denoiser call."""
