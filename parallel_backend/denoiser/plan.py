"""A checked request as the numbers that every rank computes from."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ..interfaces.geometry import Extent, Geometry, Shape
from ..interfaces.strategy import ParameterShapes, Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..protocol.model_spec import Adapter
from ..protocol.packing import packed_shape


@dataclass(frozen=True, kw_only=True)
class DenoisingPlan:
    """A checked ``Forward`` or ``Sample``, equal on every rank.

    Attributes:
        samples: number of samples, by branch.
        latents: shapes of a sample's latents by name, by branch. The picture's ``[C, ...]`` comes first.
        extents: number of tokens, by branch.
        alike: key by branch; branches with equal keys have inputs of equal shapes and are of the same variant, and may
            run as one batch.
        skipped: numbers of the blocks that are left out, by branch.
        adapters: LoRAs, by branch.
        guided: whether this is a step loop, where the ranks themselves need the guided prediction.
        teacache: see ``Family``.
    """

    layout: ParallelLayout
    geometry: Geometry
    samples: tuple[int, ...]
    latents: tuple[Mapping[str, Shape], ...]
    extents: tuple[Extent, ...]
    alike: tuple[Hashable, ...]
    skipped: tuple[frozenset[int], ...]
    adapters: tuple[tuple[Adapter, ...], ...]
    guided: bool
    teacache: tuple[float, ...] = ()

    @property
    def split(self) -> Split:
        """How the ranks share the work."""
        return Split.of(self.layout)

    @property
    def variants(self) -> tuple[Hashable, ...]:
        """By branch, what it changes in the transformer. Branches that change different things are no batch."""
        return tuple(zip(self.skipped, self.adapters, strict=True))

    @property
    def whole_latent(self) -> Shape:
        """Shape of what a sampler changes: the latent of all samples, packed if there are several."""
        return (self.samples[0], *packed_shape(self.shapes()))

    def sizes(self, branch: int = 0) -> tuple[Shape, ...]:
        """Return what ``Family.prediction`` needs: the picture's size, and the shapes of the other latents."""
        picture, *others = self.shapes(branch)
        return picture[1:], *others

    def shapes(self, branch: int = 0) -> tuple[Shape, ...]:
        """Return the shapes of a sample's latents, as ``packing.unpack`` needs them."""
        return tuple(self.latents[branch].values())

    @property
    def branches(self) -> int:
        """Number of branches that are computed."""
        return len(self.latents)

    def workload(
        self, itemsize: int = 4, parameters: ParameterShapes = (), stages: tuple[tuple[int, ...], ...] = ()
    ) -> Workload:
        """The numbers that strategies need.

        Args:
            itemsize: bytes of one value in the model's dtype.
        """
        return Workload(
            branches=tuple(zip(self.samples, self.extents, strict=True)),
            alike=self.alike,
            geometry=self.geometry,
            itemsize=itemsize,
            guided=self.guided,
            parameters=parameters,
            latent=math.prod(packed_shape(self.shapes())),
            stages=stages,
        )


def split_names(named: Mapping[str, Any], branches: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sort ``{branch}.{name}`` by branch. Names without the number of a branch are in the second result."""
    split: list[dict[str, Any]] = [{} for _ in range(max(branches, 0))]
    rest = {}
    for name, value in named.items():
        branch, dot, argument = name.partition(".")
        if dot and branch.isdecimal() and int(branch) < branches:
            split[int(branch)][argument] = value
        else:
            rest[name] = value
    return split, rest
