"""What a planner above the engine says of a request: its layout, and why."""

from dataclasses import dataclass
from typing import Protocol

from ..denoiser.plan import DenoisingPlan
from ..distributed.mesh import Axis
from ..interfaces.geometry import Shapes
from ..layout.parallel_layout import ParallelLayout
from ..loading.components import ComponentCache
from ..protocol.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The layout of a request, and the reason in a sentence."""

    layout: ParallelLayout
    reason: str


class Planner(Protocol):
    """Chooses layouts. All ranks of the world call it together."""

    def __call__(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis
    ) -> Planned: ...
