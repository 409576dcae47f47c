"""``Chooser``: on the ranks, the layout of a request whose model asks for a plan. All ranks of the world take part."""

import logging
from collections.abc import Hashable, Mapping
from pathlib import Path

import torch

from ..denoiser.plan import DenoisingPlan
from ..distributed.collectives import gather_texts
from ..distributed.mesh import Axis
from ..engine.planned import Planned
from ..errors import InvalidRequest
from ..interfaces.geometry import Shapes
from ..layout.parallel_layout import ParallelLayout
from ..loading.components import ComponentCache
from ..progress import PROGRESS
from ..protocol.model_spec import ModelSpec
from ..protocol.tensors import NAMES
from . import measured, models, probe, record
from .hardware.description import Hardware, parse, text
from .planning import plan as planned
from .request import Prompt, of_plan

log = logging.getLogger(__name__)

_STEPS = 20
"""Steps of a sampling, which ComfyUI's loop does not say. Exact layouts are ordered alike whatever it is."""
_APART = "\n"
_KEPT = 64
"""Plans that are kept."""


class Chooser:
    """Plans requests, and keeps the plans.

    Args:
        folder: of the measurements; the user's by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: dict[Hashable, Planned] = {}

    def __call__(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis
    ) -> Planned:
        """Return the layout for a request. Collective over the world, with the same arguments on every rank.

        Args:
            plan: of the request.
            model: as the request names it.
            components: of the model.
            shapes: of the inputs of its first branch.
            world: all ranks.

        Raises:
            InvalidRequest: the mode is none, or the request fits in no layout. On every rank alike.
        """
        sizes = str([dict(each) for each in plan.latents])
        key = model.identity, model.stamp, model.mode, model.compile, components.dtype, sizes, plan.samples, plan.guided
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            with PROGRESS.phase("planning"):
                self._kept[key] = self._plan(plan, model, components, shapes, world)
            log.info("planned: %s", self._kept[key].reason)
        return self._kept[key]

    def _plan(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis
    ) -> Planned:
        prompt = of_plan(
            plan, models.of(components.checkpoint), shapes, steps=_STEPS, dtype=components.dtype,
            compiled=model.compile != "off",
        )  # fmt: skip
        hardware = self._hardware(prompt, model, world, components.device)
        said = gather_texts(self._chosen(prompt, hardware, model.mode) if world.index == 0 else "", world)[0]
        layout, _, reason = said.partition(_APART)
        if not layout:
            raise InvalidRequest(reason)
        return Planned(layout=ParallelLayout.parse(layout), reason=reason)

    @staticmethod
    def _chosen(prompt: Prompt, hardware: Hardware, mode: str) -> str:
        """Return layout and reason, or no layout and a refusal."""
        try:
            made = planned(prompt, hardware, mode=mode)
        except InvalidRequest as refusal:
            return f"{_APART}{refusal}"
        return f"{made.chosen.layout}{_APART}{made.reason}"

    def _hardware(self, prompt: Prompt, model: ModelSpec, world: Axis, device: torch.device) -> Hardware:
        """Return what has been measured, or measure it. Rank 0 keeps the records."""
        devices = model.devices.first(world.size)
        mine = ""
        if world.index == 0:
            facts = record.facts_of(devices)
            path = record.file_of(devices, prompt, self._folder or record.folder())
            found = record.read(path, facts)
            if found.note:
                log.warning("%s: it is measured again", found.note)
            mine = text(found.hardware).decode() if found.hardware else _APART.join(facts.devices)
        known = gather_texts(mine, world)[0]
        if known.startswith("{"):
            return parse(known.encode(), "the measurement of this machine")
        hardware = probe.measure(_request(prompt, model, tuple(known.split(_APART))), world, device)
        if world.index == 0 and (note := record.write(path, facts, hardware)):
            log.warning("%s", note)
        return hardware


def _request(prompt: Prompt, model: ModelSpec, names: tuple[str, ...]) -> probe.ProbeRequest:
    sizes = model.devices.first(len(names)).host_sizes
    config: Mapping[str, object] = prompt.model.config
    return probe.ProbeRequest(
        class_name=prompt.model.class_name, config=dict(config), shapes=prompt.shapes, dtype=NAMES[prompt.dtype],
        name=measured.name(model.devices, names), device_names=names, hosts=sizes if len(sizes) > 1 else (),
    )  # fmt: skip
