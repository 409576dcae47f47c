"""``Chooser``: on the ranks, the layout of a request whose model asks for a plan. All ranks of the world take part."""

import logging
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ..denoiser.plan import DenoisingPlan
from ..distributed.collectives import gather_texts
from ..distributed.mesh import Axis
from ..engine.layout_trial import LayoutTrial, fastest
from ..engine.planned import Planned
from ..errors import InvalidRequest
from ..interfaces.geometry import Shapes
from ..layout.modes import AUTO
from ..loading.components import ComponentCache
from ..progress import PROGRESS
from ..protocol.model_spec import ModelSpec
from . import agreed, models, record
from .agreed import AgreedPlan
from .balancing import shares_of_rows
from .kept_times import KeptTimes, TrialNotes
from .own_machine import OwnMachine, with_memory
from .reasons import changed, tried
from .request import of_plan
from .slowdown import EVERY, Watch, as_now

log = logging.getLogger(__name__)

_STEPS = 20
"""Steps of a sampling, which ComfyUI's loop does not say. Exact layouts are ordered alike whatever it is."""
_KEPT = 64
"""Plans that are kept, and kinds of work whose layouts are tried or have been."""

T = TypeVar("T")


class Chooser:
    """Plans requests, and keeps the plans.

    Args:
        folder: of the measurements; the user's by default.
        watch: notices ranks that have become slower or faster since.
    """

    def __init__(self, folder: Path | None = None, watch: Watch | None = None) -> None:
        self._folder, self._watch = folder or record.folder(), watch or Watch()
        self._machine = OwnMachine(self._folder, self._watch)
        self._plans: dict[Hashable, AgreedPlan] = {}
        self._works: dict[Hashable, Planned] = {}

    def __call__(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis,
        asker: Hashable = None, steps: int | None = None, adapt: bool = True,
    ) -> Planned:  # fmt: skip
        """Return the layout for a request. Collective over the world, with the same arguments on every rank.

        Args:
            plan: of the request.
            model: as the request names it.
            components: of the model.
            shapes: of the inputs of its first branch.
            world: all ranks.
            asker: the node that asks. How fast the ranks are is not looked at while it asks again.
            steps: of the sampling; None if ComfyUI runs it.
            adapt: see ``Forward``. Without it, another process may give memory back before the request comes again.

        Raises:
            InvalidRequest: the mode is none, or the request fits in no layout, which ``auto`` leaves to what is taken
                without a plan. On every rank alike.
        """
        try:
            found = self._found(plan, model, components, shapes, world, asker, steps, adapt)
        finally:
            note = self._machine.take_note()
        return replace(found, reason="; ".join(filter(None, (note, found.reason))))

    def _found(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis,
        asker: Hashable, steps: int | None, adapt: bool,
    ) -> Planned:  # fmt: skip
        key: Hashable = (*_asked(plan, model), components.dtype, steps)
        with PROGRESS.phase("planning"):
            known = self._plans.get(key)
            if known is None or (adapt and not known.adapted):
                known = self._plan(plan, model, components, shapes, world, steps, adapt)
                log.info("planned: %s", known.reason)
            if known.measured is None:  # the next time it may work
                return Planned(layout=None, reason=known.reason)
            self._plans.pop(key, None)  # the last one to leave
            _keep(self._plans, key, known)
            if not known.layouts:
                return Planned(layout=None, reason=known.reason)
            key, made = self._as_now((key, known.adapted), known, model, world, components.device, asker)
        found = self._tried(key, made, plan, model, world)
        return replace(found, holds=EVERY, speeds=shares_of_rows(made.hardware, world.size).balance)

    def _tried(self, key: Hashable, made: AgreedPlan, plan: DenoisingPlan, model: ModelSpec, world: Axis) -> Planned:
        """Return the layout that has been found by trying, or begin to try. Collective over the world."""
        if len(made.layouts) == 1 or len(set(plan.variants)) > 1:  # branches that differ are no batch, as most are
            return Planned(layout=made.layouts[0], reason=made.reason)
        tokens = tuple(tuple(extent.streams.items()) for extent in plan.extents)
        work = key, tokens, plan.variants
        if made.prompt.loop:
            return self._begun(work, made, model, world)
        if work not in self._works:
            _keep(self._works, work, self._begun(work, made, model, world))
        return self._works[work]

    def _plan(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis,
        steps: int | None, adapt: bool,
    ) -> AgreedPlan:  # fmt: skip
        prompt = of_plan(
            plan, models.of(components.checkpoint), shapes, steps=steps or _STEPS, dtype=components.dtype,
            compiled=model.compile != "off",
        )  # fmt: skip
        room = components.memory.room
        measured = self._machine.hardware(prompt, model, world, components.memory)
        if isinstance(measured, str):
            return AgreedPlan(prompt=prompt, reason=measured)
        if model.mode != AUTO:
            hardware = with_memory(measured, room.most if adapt else room.limit, world)
            return replace(agreed.agree(prompt, hardware, model, world), adapted=adapt)
        try:  # for roomy devices: see ``automatic_layout``
            return agreed.agree(prompt, with_memory(measured, room.limit, world), model, world, whole=True)
        except InvalidRequest:
            return AgreedPlan(prompt=prompt, reason="", measured=measured)

    def _as_now(
        self, key: Hashable, made: AgreedPlan, model: ModelSpec, world: Axis, device: torch.device, asker: Hashable
    ) -> tuple[Hashable, AgreedPlan]:
        """Return the plan for ranks that compute as fast as they do now, and its key. Collective over the world.

        What other programs do for a while is no reason to read weights anew, to compile or to compute another picture,
        so layouts that split weights stay, and so do approximate and compiled ones. Ranks that shard weights, whose
        parts are equal in any case, share tokens and heads anew.
        """
        layout = made.layouts[0]
        shards = layout.shard_weights and layout.tensor == 1
        if (layout.splits_weights and not shards) or layout.approximation or model.compile != "off":
            return key, made
        speeds = self._watch.speeds(made.hardware, world, device, asker)
        if set(speeds[: layout.ranks]) == {1.0} and max(speeds) == 1:  # none that it uses, and none is worth using
            return key, made
        now = key, speeds
        if now not in self._plans:
            hardware = as_now(made.hardware, speeds)
            try:
                found = (
                    agreed.rebalance(made, hardware, world)
                    if shards
                    else agreed.agree(made.prompt, hardware, model, world, whole=True)
                )
            except InvalidRequest:  # only weights that are split fit
                found = made
            words = changed(speeds)
            _keep(self._plans, now, replace(found, reason=f"{words}{found.reason}", changed=words))
            log.info("planned: %s", self._plans[now].reason)
        return now, self._plans[now]

    def _begun(self, work: Hashable, made: AgreedPlan, model: ModelSpec, world: Axis) -> Planned:
        """Begin to try layouts, or take what earlier processes have found. Collective over the world."""
        keeps = world.index == 0 and not made.changed
        kept = KeptTimes(made, model, self._folder, world.size) if keeps else None
        said = msgspec.json.encode(kept.times() if kept else {}).decode()
        times = msgspec.json.decode(gather_texts(said, world)[0], type=dict[str, float | None])
        first, *others = made.layouts
        layouts = [first, *(each for each in others if times.get(str(each), 0) is not None)]
        known = {each: seconds for each in layouts if (seconds := times.get(str(each))) is not None}
        if len(known) == len(layouts):
            layout = fastest(first, known)
            return Planned(layout=layout, reason=tried(layout, known))
        if made.prompt.loop:  # the ranks' own loop keeps its layout
            return Planned(layout=first, reason=made.reason)
        notes = TrialNotes(kept, lambda found: _keep(self._works, work, found), made.changed)
        return Planned(layout=first, reason=made.reason, trial=lambda: LayoutTrial(layouts, known, notes))


def _asked(plan: DenoisingPlan, model: ModelSpec) -> tuple[Hashable, ...]:
    """Return what requests have in common that have one plan."""
    sizes = str([dict(each) for each in plan.latents])
    tokens = tuple(-(-sum(extent.streams.values()) // record.TEXT) for extent in plan.extents)
    asked = model.identity, model.stamp, model.mode, model.compile, model.attention
    return *asked, sizes, tokens, plan.samples, plan.guided


def _keep(kept: dict[Hashable, T], key: Hashable, value: T) -> None:
    """Add an entry. The oldest ones leave."""
    while len(kept) >= _KEPT and key not in kept:
        kept.pop(next(iter(kept)))
    kept[key] = value
