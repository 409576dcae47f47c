"""What a checked request comes to: the numbers that every rank computes by."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ..interfaces.geometry import Extent, Geometry
from ..interfaces.strategy import Parameters, Workload
from ..layout.parallel_layout import ParallelLayout

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DenoisingPlan:
    """A checked ``Forward`` or ``Sample``: what is computed, known on every rank.

    Attributes:
        latents: the latent's shape ``[B, C, ...]`` per branch; ``extents``: what the branch comes to.
        alike: by branch its inputs' shapes.
        guided: whether it is a step loop, in which the ranks themselves go on with the prediction.
    """

    layout: ParallelLayout
    geometry: Geometry
    latents: tuple[Shape, ...]
    extents: tuple[Extent, ...]
    alike: tuple[Hashable, ...]
    guided: bool

    @property
    def branches(self) -> int:
        """Number of branches that are computed."""
        return len(self.latents)

    def job(self, itemsize: int = 4, parameters: Parameters = (), stages: tuple[tuple[int, ...], ...] = ()) -> Workload:
        """The numbers that strategies ask for; ``itemsize`` is that of the model's dtype, in bytes."""
        samples = [latent[0] for latent in self.latents]
        return Workload(
            branches=tuple(zip(samples, self.extents, strict=True)),
            alike=self.alike,
            geometry=self.geometry,
            itemsize=itemsize,
            guided=self.guided,
            parameters=parameters,
            latent=math.prod(self.latents[0][1:]),
            stages=stages,
        )


def split_names(named: Mapping[str, Any], branches: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sort ``{i}.{name}`` into branches; what has no branch number stays in the second part."""
    split: list[dict[str, Any]] = [{} for _ in range(max(branches, 0))]
    rest = {}
    for name, value in named.items():
        branch, dot, argument = name.partition(".")
        if dot and branch.isdecimal() and int(branch) < branches:
            split[int(branch)][argument] = value
        else:
            rest[name] = value
    return split, rest
