"""``Chooser``: on the ranks, the layout of a request whose model asks for a plan. All ranks of the world take part."""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ..denoiser.plan import DenoisingPlan
from ..distributed.collectives import all_true, gather_numbers, gather_texts
from ..distributed.mesh import Axis
from ..engine.layout_trial import LayoutTrial, Seconds, fastest
from ..engine.planned import Planned
from ..errors import InvalidRequest
from ..interfaces.geometry import Shapes
from ..layout.modes import APPROXIMATE, AUTO, FASTEST
from ..layout.parallel_layout import ParallelLayout
from ..loading.components import ComponentCache
from ..loading.offload_plan import with_slack
from ..loading.parts import DeviceMemory
from ..loading.room import room_on
from ..progress import PROGRESS
from ..protocol.model_spec import ModelSpec
from ..protocol.tensors import NAMES
from . import measured, models, probe, record
from .balancing import shares_of_rows
from .hardware.description import Hardware, parse, text
from .memory import work_bytes
from .planning import plan as planned
from .planning import rivals
from .reasons import changed, tried
from .request import Prompt, of_plan
from .slowdown import EVERY, Watch, as_now

log = logging.getLogger(__name__)

_STEPS = 20
"""Steps of a sampling, which ComfyUI's loop does not say. Exact layouts are ordered alike whatever it is."""
_APART = "\n"
_KEPT = 64
"""Plans that are kept, and kinds of work whose layouts are tried or have been."""
_KINDS = 16
"""Kinds of work of a plan whose times are kept on disk."""

T = TypeVar("T")


_WHY = "-"
"""What a refusal to measure begins with among the ranks."""
_ENDED = (
    "measuring this machine did not end, so the layout is the one that is taken without a plan, for a day or until {} "
    "is removed"
)
_NO_ROOM = "a device has no room to be measured for this size, so the layout is the one that is taken without a plan"


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of a plan: layouts, the expected best first, or none and a refusal."""

    reason: str
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A plan on every rank.

    Attributes:
        prompt: what for.
        reason: of the choice, in a sentence.
        measured: on which machine; None if nobody has measured it.
        layouts: the choice, and those that may be as fast; none for what is taken without a plan.
        changed: how the machine differs from what was measured, for the begin of a sentence; "" if it does not. What is
            tried on one that differs is not kept on disk.
        adapted: whether it is for the memory that was there, and not for all of it.
    """

    prompt: Prompt
    reason: str
    measured: Hardware | None = None
    layouts: tuple[ParallelLayout, ...] = ()
    changed: str = ""
    adapted: bool = True

    @property
    def hardware(self) -> Hardware:
        """The machine of a plan with layouts."""
        assert self.measured is not None
        return self.measured


class Chooser:
    """Plans requests, and keeps the plans.

    Args:
        folder: of the measurements; the user's by default.
        watch: notices ranks that have become slower or faster since.
    """

    def __init__(self, folder: Path | None = None, watch: Watch | None = None) -> None:
        self._folder, self._watch = folder, watch or Watch()
        self._plans: dict[Hashable, _Made] = {}
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
            if model.mode == AUTO:  # which never asks again
                speeds = shares_of_rows(known.hardware, world.size).balance
                return Planned(layout=known.layouts[0], reason=known.reason, speeds=speeds)
            key, made = self._as_now((key, known.adapted), known, model, world, components.device, asker)
        found = self._tried(key, made, plan, model, world)
        return replace(found, holds=EVERY, speeds=shares_of_rows(made.hardware, world.size).balance)

    def _tried(self, key: Hashable, made: _Made, plan: DenoisingPlan, model: ModelSpec, world: Axis) -> Planned:
        """Return the layout that has been found by trying, or begin to try. Collective over the world."""
        if len(made.layouts) == 1 or len(set(plan.variants)) > 1:  # branches that differ are no batch, as most are
            return Planned(layout=made.layouts[0], reason=made.reason)
        tokens = tuple(tuple(extent.streams.items()) for extent in plan.extents)
        work = key, tokens, plan.variants, model.attention
        if made.prompt.loop:
            return self._begun(work, made, model, world)
        if work not in self._works:
            _keep(self._works, work, self._begun(work, made, model, world))
        return self._works[work]

    def _plan(
        self, plan: DenoisingPlan, model: ModelSpec, components: ComponentCache, shapes: Shapes, world: Axis,
        steps: int | None, adapt: bool,
    ) -> _Made:  # fmt: skip
        prompt = of_plan(
            plan, models.of(components.checkpoint), shapes, steps=steps or _STEPS, dtype=components.dtype,
            compiled=model.compile != "off",
        )  # fmt: skip
        room = components.memory.room
        measured = self._hardware(prompt, model, world, components.memory)
        if isinstance(measured, str):
            return _Made(prompt=prompt, reason=measured)
        if model.mode != AUTO:
            hardware = _with_memory(measured, room.most if adapt else room.limit, world)
            return replace(_agreed(prompt, hardware, model, world), adapted=adapt)
        try:  # for roomy devices: see ``automatic_layout``
            return _agreed(prompt, _with_memory(measured, room.limit, world), model, world, whole=True)
        except InvalidRequest:
            return _Made(prompt=prompt, reason="", measured=measured)

    def _as_now(
        self, key: Hashable, made: _Made, model: ModelSpec, world: Axis, device: torch.device, asker: Hashable
    ) -> tuple[Hashable, _Made]:
        """Return the plan for ranks that compute as fast as they do now, and its key. Collective over the world.

        What other programs do for a while is no reason to read weights anew, to compile or to compute another picture,
        so layouts that split weights stay, and so do approximate and compiled ones.
        """
        layout = made.layouts[0]
        if layout.splits_weights or layout.approximation or model.compile != "off":
            return key, made
        speeds = self._watch.speeds(made.hardware, world, device, asker)
        if set(speeds[: layout.ranks]) == {1.0} and max(speeds) == 1:  # none that it uses, and none is worth using
            return key, made
        now = key, speeds
        if now not in self._plans:
            try:
                found = _agreed(made.prompt, as_now(made.hardware, speeds), model, world, whole=True)
            except InvalidRequest:  # only weights that are split fit
                found = made
            words = changed(speeds)
            _keep(self._plans, now, replace(found, reason=f"{words}{found.reason}", changed=words))
            log.info("planned: %s", self._plans[now].reason)
        return now, self._plans[now]

    def _begun(self, work: Hashable, made: _Made, model: ModelSpec, world: Axis) -> Planned:
        """Begin to try layouts, or take what earlier processes have found. Collective over the world."""
        keeps = world.index == 0 and not made.changed
        kept = _Kept(made, model, self._folder or record.folder(), world.size) if keeps else None
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
        notes = _Notes(kept, lambda found: _keep(self._works, work, found), made.changed)
        return Planned(layout=first, reason=made.reason, trial=lambda: LayoutTrial(layouts, known, notes))

    def _hardware(self, prompt: Prompt, model: ModelSpec, world: Axis, memory: DeviceMemory) -> Hardware | str:
        """Return what has been measured, or measure it, or why that cannot be done. Rank 0 keeps the records."""
        mine = ""
        if world.index == 0:
            devices = model.devices.first(world.size)
            facts = record.facts_of(devices)
            path = record.file_of(devices, prompt, self._folder or record.folder())
            found = record.read(path, facts)
            if found.hardware:
                mine = text(found.hardware).decode()
            elif found.begun:
                mine = _WHY + _ENDED.format(path)
            else:
                if found.note:
                    log.warning("%s: it is measured again", found.note)
                mine = _APART.join(facts.devices)
        known = gather_texts(mine, world)[0]
        if known.startswith(_WHY):
            return known.removeprefix(_WHY)
        if known.startswith("{"):
            return parse(known.encode(), "the measurement of this machine")
        if not all_true(not memory.lacks(_probe_bytes(prompt), world.size), world):
            return "" if model.mode == AUTO else _NO_ROOM
        # If the ranks end now, the next ones do not measure.
        unkept = record.write(path, facts, None) if world.index == 0 else ""
        if unkept:
            log.warning("%s", unkept)
        if model.mode == AUTO and not all_true(not unkept, world):
            return ""
        hardware = probe.measure(_request(prompt, model, tuple(known.split(_APART))), world, memory.device)
        self._watch.note(hardware.paces)
        if world.index == 0 and (note := record.write(path, facts, hardware)):
            log.warning("%s", note)
        return hardware


class _Kept:
    """What has been tried of a plan, on rank 0's disk, beside what has been measured."""

    def __init__(self, made: _Made, model: ModelSpec, folder: Path, ranks: int) -> None:
        devices = model.devices.first(ranks)
        self._facts, self._hardware = record.facts_of(devices), made.hardware
        self._path = record.file_of(devices, made.prompt, folder)
        guidance = f"{made.prompt.branches} branches of {made.prompt.samples}"
        self._kind = f"{guidance}, attention={model.attention}, {model.stamp}"

    def times(self) -> dict[str, float | None]:
        """Return the seconds of a step by layout; None for one whose first step was the ranks' last."""
        return record.read(self._path, self._facts).tried.get(self._kind, {})

    def add(self, times: Mapping[str, float | None], works: str = "") -> None:
        """Keep seconds, beside those of other layouts and of other work.

        Args:
            works: a layout whose first step has ended.
        """
        found = record.read(self._path, self._facts)
        tried = found.tried
        before = tried.pop(self._kind, {})
        if before.get(works, 0) is None:
            del before[works]
        tried = dict([*tried.items()][1 - _KINDS :]) | {self._kind: {**before, **times}}
        if note := record.write(self._path, self._facts, found.hardware or self._hardware, tried):
            log.warning("%s", note)


class _Notes:
    """Keeps what comes of trials, on disk where there is a ``kept``. Reasons begin with ``words``."""

    def __init__(self, kept: _Kept | None, settled: Callable[[Planned], None], words: str) -> None:
        self._kept, self._settled, self._words = kept, settled, words
        self._trying = ""

    def note(self, seconds: Seconds, trying: ParallelLayout | None) -> None:
        """Keep the seconds, and that a layout is tried now: if the ranks end with it, it is not tried again."""
        works, self._trying = self._trying, "" if trying is None else str(trying)
        if self._kept:
            times: dict[str, float | None] = {str(layout): each for layout, each in seconds.items()}
            self._kept.add(times | ({self._trying: None} if self._trying else {}), works)

    def settle(self, layout: ParallelLayout, seconds: Seconds) -> str:
        """Take a layout from now on."""
        reason = f"{self._words}{tried(layout, seconds)}"
        self._settled(Planned(layout=layout, reason=reason))
        self.note(seconds, None)
        return reason


def _asked(plan: DenoisingPlan, model: ModelSpec) -> tuple[Hashable, ...]:
    """Return what requests have in common that have one plan."""
    sizes = str([dict(each) for each in plan.latents])
    tokens = tuple(-(-sum(extent.streams.values()) // record.TEXT) for extent in plan.extents)
    return model.identity, model.stamp, model.mode, model.compile, sizes, tokens, plan.samples, plan.guided


def _keep(kept: dict[Hashable, T], key: Hashable, value: T) -> None:
    """Add an entry. The oldest ones leave."""
    while len(kept) >= _KEPT and key not in kept:
        kept.pop(next(iter(kept)))
    kept[key] = value


def _probe_bytes(prompt: Prompt) -> int:
    """Return the bytes that a probe takes on a device: blocks of two kinds, all that is not in blocks, and tensors."""
    sizes = prompt.layers(1).sizes
    return sizes.outside + 2 * max(sizes.blocks, default=0) + with_slack(max(work_bytes(prompt, ParallelLayout())))


def _with_memory(hardware: Hardware, mine: int, world: Axis) -> Hardware:
    """Return the machine with the memory of each rank. Collective over the world.

    Other programs, a limit and loaded models change it from prompt to prompt, so what was measured once does not hold.
    """
    on_host = room_on(torch.device("cpu"), 0).free
    memory, hosts = zip(*gather_numbers([max(mine, 1), on_host], world), strict=True)
    return hardware.with_memory(memory, float(min(hosts)))


def _agreed(prompt: Prompt, hardware: Hardware, model: ModelSpec, world: Axis, *, whole: bool = False) -> _Made:
    """Plan on rank 0, and let all ranks know. Collective over the world.

    Args:
        whole: see ``planning.plan``.

    Raises:
        InvalidRequest: the mode is none, or the request fits in no layout. On every rank alike.
    """
    said = _said(prompt, hardware, model, whole) if world.index == 0 else None
    said = msgspec.json.decode(gather_texts(msgspec.json.encode(said).decode(), world)[0], type=_Said)
    if not said.layouts:
        raise InvalidRequest(said.reason)
    layouts = tuple(map(ParallelLayout.parse, said.layouts))
    return _Made(prompt=prompt, measured=hardware, layouts=layouts, reason=said.reason)


def _said(prompt: Prompt, hardware: Hardware, model: ModelSpec, whole: bool) -> _Said:
    """Plan a request on rank 0."""
    try:
        made = planned(prompt, hardware, mode=model.mode, whole=whole, all_ranks=model.mode == AUTO)
    except InvalidRequest as refusal:
        return _Said(reason=str(refusal))
    except Exception as error:  # other ranks wait for this one, and all have to know
        log.exception("no layout can be predicted")
        what = f"no layout can be predicted for this request ({type(error).__name__}, see the log of rank 0)"
        return _Said(reason=f"{what}: choose mode {AUTO}, or degrees in Parallel Layout")
    if model.mode == AUTO and not made.chosen.room.whole:
        return _Said(reason="")
    # Compiling for another layout takes longer than it saves.
    tries = model.mode in (FASTEST, APPROXIMATE) and model.compile == "off"
    others = rivals(made) if tries else ()
    return _Said(reason=made.reason, layouts=tuple(map(str, (made.chosen.layout, *others))))


def _request(prompt: Prompt, model: ModelSpec, names: tuple[str, ...]) -> probe.ProbeRequest:
    sizes = model.devices.first(len(names)).host_sizes
    config: Mapping[str, object] = prompt.model.config
    return probe.ProbeRequest(
        class_name=prompt.model.class_name, config=dict(config), shapes=prompt.shapes, dtype=NAMES[prompt.dtype],
        name=measured.name(model.devices, names), device_names=names, hosts=sizes if len(sizes) > 1 else (),
    )  # fmt: skip
