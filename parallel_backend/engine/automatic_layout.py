"""The layout of a request that names none, where a device has no room for the whole transformer."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..denoiser.plan import DenoisingPlan
from ..layout.choice import sharing
from ..layout.parallel_layout import ParallelLayout
from ..loading.components import ComponentCache
from ..loading.load import transformer_bytes
from ..loading.offload_plan import PartSizes, with_slack
from ..loading.room import Claim, claims_of_all, shortage
from ..loading.transformer_part import whole_sizes
from ..protocol.model_spec import ModelSpec
from .agreements import Agreements, ChosenLayout, LayoutKey
from .validation import is_refused
from .working_memory import forward_bytes

log = logging.getLogger(__name__)


def fit(
    plan: DenoisingPlan, components: ComponentCache, model: ModelSpec, agreements: Agreements, *, adapt: bool
) -> DenoisingPlan:
    """Return the plan in a layout whose weights fit on the devices, if there is one. Collective over the world.

    Layouts with whole weights come first. If none fits, the plan keeps its layout, and blocks stream.
    A choice stays until a request needs more memory or the model is unloaded. Where requests take turns that divide
    the weights differently, such as steps with and without guidance, the one that can takes over the other's layout.
    Otherwise each turn would load the weights anew.

    Args:
        plan: the request in the layout that suits roomy devices.
        components: of the model.
        model: as the request names it.
        agreements: of all ranks.
        adapt: whether to look for another layout if none is chosen yet.
    """
    work = _work(plan, components.checkpoint, components.dtype)
    key = LayoutKey(model=model.identity, stamp=model.stamp, dtype=components.dtype, layout=plan.layout)
    chosen = agreements.layouts.get(key)
    if chosen is None or (adapt and work > chosen.work):
        if not adapt:
            return plan
        rooms = claims_of_all(agreements.world, components.memory.claim(0))
        chosen = ChosenLayout(work=work, layout=choose(plan, components.checkpoint, components.dtype, rooms))
    else:
        latest = agreements.latest_layout(key)
        if latest and _takes_over(replace(plan, layout=latest.layout), components, chosen, latest):
            chosen = ChosenLayout(work=work, layout=latest.layout)
    agreements.use_layout(key, chosen)
    return replace(plan, layout=chosen.layout)


def _takes_over(plan: DenoisingPlan, components: ComponentCache, chosen: ChosenLayout, latest: ChosenLayout) -> bool:
    """Whether a request, as a plan in the latest layout, leaves its own layout for that, whose weights are loaded."""
    if plan.layout == chosen.layout or not (plan.layout.splits_weights and chosen.layout.splits_weights):
        return False
    work = _work(plan, components.checkpoint, components.dtype)
    return not is_refused(plan.layout, plan.workload()) and work <= latest.work


def choose(plan: DenoisingPlan, checkpoint: Checkpoint, dtype: torch.dtype, rooms: Sequence[Claim]) -> ParallelLayout:
    """Return the first layout whose weights fit on the devices, or the plan's own if none is, by the files' headers.

    Args:
        plan: the request in the layout that suits roomy devices.
        checkpoint: of the model.
        dtype: of activations.
        rooms: of the devices, by rank.
    """
    names = [name for name in (HIGH_NOISE, LOW_NOISE) if name in checkpoint.components]
    most = max(transformer_bytes(checkpoint, name) for name in names)
    if _fits(plan, _work(plan, checkpoint, dtype), rooms, most):
        return plan.layout
    sizes = [whole_sizes(checkpoint, dtype, name) for name in names]
    for layout in (plan.layout, *sharing(plan.layout)):
        if is_refused(layout, plan.workload()):
            continue
        other = replace(plan, layout=layout)
        if _fits(other, _work(other, checkpoint, dtype), rooms, max(_taken(each, layout) for each in sizes)):
            if layout != plan.layout:
                log.warning("the devices have no room for all of %s each: the layout is %s", checkpoint.name, layout)
            return layout
    return plan.layout


def _fits(plan: DenoisingPlan, work: int, rooms: Sequence[Claim], weights: int) -> bool:
    needed = weights + with_slack(work)
    return shortage([replace(each, needed=needed) for each in rooms[: plan.layout.ranks]]) is None


def _taken(sizes: PartSizes, layout: ParallelLayout) -> int:
    """Estimate what a rank holds of the weights. What the ranks decide before they load is exact."""
    if layout.shard_weights:
        return sizes.shared_by(layout.sequence)
    return sizes.outside + sum(sizes.blocks) // layout.tensor


def _work(plan: DenoisingPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the tensors of the busiest rank take at least."""
    name = checkpoint.components[HIGH_NOISE]
    return max(forward_bytes(name, plan, rank, dtype.itemsize) for rank in range(plan.layout.ranks))
