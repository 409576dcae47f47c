"""The layout of a request that names none, where a device has no room for the whole transformer."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..denoiser.plan import DenoisingPlan
from ..layout.balance import MAX_SPEED
from ..layout.choice import sharing
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
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

_UNLIKE = 1.1
"""By how much more room a device has than another before their shares of the weights differ."""


def fit(
    plan: DenoisingPlan, components: ComponentCache, model: ModelSpec, agreements: Agreements, *, adapt: bool,
    roomy: ParallelLayout | None = None,
) -> DenoisingPlan:  # fmt: skip
    """Return the plan in a layout whose weights fit on the devices, if there is one. Collective over the world.

    Layouts with whole weights come first. If none fits, the plan keeps its layout, and blocks stream.
    A choice stays until a request needs more memory or the model is unloaded. Whole weights stay also where another
    layout of them is to be taken, as for a device that has become slower, and has no room. Where requests take turns
    that divide the weights differently, such as steps with and without guidance, the one that can takes over the
    other's layout. Otherwise each turn would load the weights anew.

    Args:
        plan: the request in the layout that suits roomy devices.
        components: of the model.
        model: as the request names it.
        agreements: of all ranks.
        adapt: whether to look for another layout if none is chosen yet.
        roomy: the layout of whole weights to take where they fit, if not the plan's.
    """
    roomy = roomy or plan.layout
    work, wanted = (
        _work(replace(plan, layout=each), components.checkpoint, components.dtype) for each in (plan.layout, roomy)
    )
    key = LayoutKey(model=model.identity, stamp=model.stamp, dtype=components.dtype, layout=plan.layout)
    chosen = agreements.layouts.get(key)
    takes = work if chosen and chosen.layout.splits_weights else wanted
    if chosen is None or (adapt and takes > chosen.work):
        if not adapt:
            return replace(plan, layout=roomy)
        rooms = claims_of_all(agreements.world, components.memory.claim(0))
        layout = choose(replace(plan, layout=roomy), components.checkpoint, components.dtype, rooms)
        fits = layout == roomy
        if not fits and roomy != plan.layout:  # what the rule gives is the same for all sizes
            if chosen and _serves(plan, components, chosen):
                agreements.use_layout(key, chosen)
                return replace(plan, layout=chosen.layout)
            layout = choose(plan, components.checkpoint, components.dtype, rooms)
            roomy = roomy if layout.splits_weights else plan.layout
        chosen = ChosenLayout(work=wanted if fits else work, layout=layout)
    else:
        latest = agreements.latest_layout(key)
        if latest and _takes_over(replace(plan, layout=latest.layout), components, chosen, latest):
            chosen = ChosenLayout(work=work, layout=latest.layout)
    agreements.use_layout(key, chosen)
    whole = not chosen.layout.splits_weights
    return replace(plan, layout=roomy if whole else chosen.layout)


def _serves(plan: DenoisingPlan, components: ComponentCache, chosen: ChosenLayout) -> bool:
    """Whether a request, as a plan in any layout, can stay in the one that was chosen, with its whole weights."""
    plan = replace(plan, layout=chosen.layout)
    if plan.layout.splits_weights or is_refused(plan.layout, plan.workload()):
        return False
    return _work(plan, components.checkpoint, components.dtype) <= chosen.work


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
    works = _works(plan, checkpoint, dtype)
    if _fits(rooms, [most + with_slack(work) for work in works]):
        return plan.layout
    sizes = [whole_sizes(checkpoint, dtype, name) for name in names]
    outside = max(each.outside for each in sizes) + with_slack(max(works))
    for layout in (plan.layout, *sharing(plan.layout), *_by_room(plan.layout.ranks, rooms, outside)):
        if is_refused(layout, plan.workload()):
            continue
        works = _works(replace(plan, layout=layout), checkpoint, dtype)
        taken = [max(_taken(each, layout, rank) for each in sizes) for rank in range(layout.ranks)]
        if _fits(rooms, [each + with_slack(work) for each, work in zip(taken, works, strict=True)]):
            if layout != plan.layout:
                log.warning("the devices have no room for all of %s each: the layout is %s", checkpoint.name, layout)
            return layout
    return plan.layout


def _fits(rooms: Sequence[Claim], needed: Sequence[int]) -> bool:
    """Whether the first ranks have room for these bytes."""
    return shortage([replace(room, needed=each) for room, each in zip(rooms, needed, strict=False)]) is None


def _by_room(ranks: int, rooms: Sequence[Claim], outside: int) -> list[ParallelLayout]:
    """Return the layout in which each rank holds weights in proportion to its room, if one has less than others.

    Args:
        ranks: number of ranks.
        rooms: of the devices, by rank.
        outside: bytes that each rank needs besides weights that are cut.
    """
    left = [room.most - outside for room in rooms[:ranks]]
    if ranks == 1 or min(left) <= 0 or max(left) < _UNLIKE * min(left):
        return []
    balance = tuple(max(1 / MAX_SPEED, round(each / max(left), 2)) for each in left)
    return [ParallelLayout(tensor=ranks, balance=balance)]


def _taken(sizes: PartSizes, layout: ParallelLayout, rank: int) -> int:
    """Estimate what a rank holds of the weights. What the ranks decide before they load is exact."""
    if layout.shard_weights:
        return sizes.shared_by(layout.sequence)
    share = Split.of(layout).cut_share(layout.coordinates(rank)["tensor"])
    return sizes.outside + int(sum(sizes.blocks) * share)


def _works(plan: DenoisingPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> list[int]:
    """Return the bytes that the tensors of each rank take at least."""
    name = checkpoint.components[HIGH_NOISE]
    return [forward_bytes(name, plan, rank, dtype.itemsize) for rank in range(plan.layout.ranks)]


def _work(plan: DenoisingPlan, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the tensors of the busiest rank take at least."""
    return max(_works(plan, checkpoint, dtype))
