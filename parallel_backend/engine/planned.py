"""What a planner above the engine says of a request: its layout, and why."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from ..checkpoint.checkpoint import HIGH_NOISE, Checkpoint
from ..denoiser.plan import DenoisingPlan, split_names
from ..distributed.mesh import Axis
from ..interfaces.geometry import TIMESTEP, Shapes
from ..layout.modes import AUTO
from ..layout.parallel_layout import ParallelLayout
from ..loading.components import ComponentCache
from ..protocol.messages import Progress
from ..protocol.model_spec import Devices, ModelSpec
from .layout_trial import LayoutTrial
from .request import ActiveRequest
from .validation import is_refused

LEAST_BYTES = 10**9
"""Bytes of a transformer's files for which ``auto`` measures the machine. Smaller ones take less time than that."""

_ALONE = "more ranks run than this model has devices, so the layout is the one that is taken without a plan"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The layout of a request, and the reason in a sentence.

    Attributes:
        layout: None for the one that is taken without a plan. In ``auto`` it stands for that: see ``automatic_layout``.
        trial: begins to try layouts in a run, if the prediction alone does not tell them apart.
        holds: seconds after which another prompt asks again.
        speeds: relative speed of each rank, by which they share the rows of pictures that a VAE codes from now on;
            empty if all are equal.
    """

    layout: ParallelLayout | None
    reason: str
    trial: Callable[[], LayoutTrial] | None = None
    holds: float = math.inf
    speeds: tuple[float, ...] = ()


class Planner(Protocol):
    """Chooses layouts. All ranks of the world call it together."""

    def __call__(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis,
        asker: Hashable, steps: int | None, adapt: bool, /,
    ) -> Planned: ...  # fmt: skip


def by_planner(
    planner: Planner | None, plan: DenoisingPlan, request: ActiveRequest[Any], components: ComponentCache, world: Axis
) -> Planned | None:
    """Return the layout that a planner chooses for a request; None if nobody asks for one, or it does not work.

    Collective over the world.
    """
    model = request.message.model
    if not model.mode or planner is None:
        return None
    if model.mode == AUTO and not _worthwhile(components.checkpoint, model.devices):
        return None
    if len(model.devices.indices) < world.size:
        request.report(Progress(phase="planning", value=1, total=1, note=_ALONE), {})
        return None
    branches, _ = split_names({meta.name: meta.shape for meta in request.metas}, plan.branches)
    latents = {name: (plan.samples[0], *shape) for name, shape in plan.latents[0].items()}
    request.report(Progress(phase="planning", value=0, total=1), {})
    shapes = {**branches[0], **latents, TIMESTEP: (plan.samples[0],)}
    steps = next((meta.shape[0] - 1 for meta in request.metas if meta.name == "sigmas"), None)
    message = request.message
    found = planner(plan, model, components, shapes, world, message.origin, steps, message.adapt)
    refused = found.layout is not None and is_refused(found.layout, plan.workload())
    wrong = f'; "{found.layout}" does not work for this request, so another is taken, as without a plan'
    note = found.reason + (wrong if refused else "")
    request.report(Progress(phase="planning", value=1, total=1, note=note), {})
    return None if refused else found


def _worthwhile(checkpoint: Checkpoint, devices: Devices) -> bool:
    """Whether a machine should be measured for a model for which nobody asks for that."""
    if len(devices.indices) == 1 or len(devices.host_sizes) > 1:
        return False
    return sum(file.stat().st_size for file in checkpoint.stored(HIGH_NOISE).files) >= LEAST_BYTES
