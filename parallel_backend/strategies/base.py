"""What every strategy says of itself."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..geometry import Extent, Geometry
from ..layout import ParallelLayout
from ..partition import Partition

Parameters = tuple[tuple[tuple[int, ...], int], ...]
"""Shape and bytes a value of each."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The static numbers of a request, known before any weight is loaded.

    Attributes:
        branches: by branch the samples and what one of them comes to.
        geometry: the model's numbers.
        itemsize: of the model's dtype, in bytes.
        alike: by branch a key; branches with the same one run as one forward where a rank has both.
        parameters: all of the blocks, for those who ask what sharing them sends.
        guided: whether the ranks of the sequence need the guided prediction (in a step loop), or rank 0 alone needs
            all branches' predictions.
    """

    branches: tuple[tuple[int, Extent], ...]
    alike: tuple[Hashable, ...]
    geometry: Geometry
    itemsize: int
    guided: bool
    parameters: Parameters = ()

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

    def check(self, layout: ParallelLayout, job: Job) -> None:
        """Refuse a layout that cannot work for the job.

        Raises:
            InvalidRequest: names the reason; what would work is for the caller to say, who knows all strategies.
        """

    def bytes_sent(self, layout: ParallelLayout, job: Job, rank: int) -> int:
        """Bytes that ``rank`` sends to others in one denoiser call."""
