"""Step loops of approximate layouts, held to one process: to the exact loop, or to the same algorithm."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.checkpoint import Checkpoint
from ...client.client import Client
from ...denoiser.plan import DenoisingPlan
from ...engine.validation import check_sample
from ...errors import InvalidRequest
from ...interfaces import patch_plan
from ...interfaces.family import Family
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP
from ...interfaces.strategy import Workload
from ...layout.parallel_layout import ParallelLayout
from ...models import FAMILIES
from ...protocol.messages import Devices, ModelSpec, Sample
from ...protocol.tensors import describe
from ...samplers.samplers import SAMPLERS, dry
from ...step_loop.schedule import CallKind, call_kinds, whole_calls
from ...strategies import STRATEGIES, displaced
from ...strategies.ring import Ring
from ...strategies.ulysses import Ulysses
from ..forward import examples
from ..forward.examples import short_name
from ..forward.run import TOLERANCE, Report, stages_of
from . import reference as one_process
from .reference import Asked, Transformer

SIGMAS = (1.0, 0.93, 0.84, 0.72, 0.58, 0.42, 0.24, 0.1, 0.0)
RANKS = (2, 3, 4)
WRITTEN = ("pipe={}", "ring={} stale=previous", "ring={} stale=none")
_FLAG = 8
"""Bytes of a flag."""
LAYERS = 4
"""Layers that a model has at least, for as many stages."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A step loop of a small model with guidance, whose branches differ in length where they may.

    Attributes:
        layout: with the steps of warm-up that it is to have.
        size, text: the variant's own where they are None.
        cfg: guidance; 1 for one branch.
    """

    class_name: str
    variant: str
    layout: ParallelLayout
    sigmas: tuple[float, ...] = SIGMAS
    sampler: str = "euler"
    cfg: float = 3.0
    batch: int = 2
    size: tuple[int, ...] | None = None
    text: int | None = None

    def __str__(self) -> str:
        steps = len(self.sigmas) - 1
        return f"{short_name(self.class_name)} {self.variant}, {self.layout}, {steps} steps of {self.sampler}"

    @property
    def exact(self) -> bool:
        """Whether no step of it is to be approximate."""
        return not self.layout.approximate or self.layout.warmup >= len(self.sigmas) - 1

    def message(self, model: Path, devices: Devices) -> Sample:
        """The request."""
        layout = self.layout
        if not layout.balance:  # cut as the reference and the formulas are, however fast the ranks are
            layout = replace(layout, balance=(1.0,) * (layout.pipe if layout.pipe > 1 else layout.ring))
        spec = ModelSpec(path=str(model), devices=devices, dtype="float32", layout=layout)
        return Sample(
            model=spec, branches=2, sampler=self.sampler, cfg=self.cfg, timestep_scale=1.0, measure=True, timed=True
        )

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors."""
        variant = examples.variant(self.class_name, self.variant)
        text, tensors = self.text or variant.text, {"sigmas": torch.tensor(self.sigmas)}
        for i, length in enumerate((text, text if variant.fixed_text else max(1, text - 2))):
            given = examples.inputs(
                self.class_name, self.variant, batch=self.batch, size=self.size, text=length, seed=i
            )
            tensors |= {f"{i}.{name}": value for name, value in given.items() if name not in (LATENT, TIMESTEP)}
            tensors |= {"x": given[LATENT]} if i == 0 else {}
        return tensors


def wanted(transformer: Transformer, message: Sample, tensors: Mapping[str, Tensor], plan: DenoisingPlan) -> Tensor:
    """What one process makes of a request in its layout's algorithm."""
    layout = plan.layout
    image = patch_plan.cut(plan.extents, patch_plan.count(layout, plan.extents))
    asked = Asked(transformer, message, tensors, layout.warmup)
    if layout.stale:
        return one_process.displaced(asked, layout, image.total)
    return one_process.pipefusion(asked, image)


def every(
    call_kinds: Sequence[tuple[str, str]], warmup: int | None, layouts: Sequence[ParallelLayout] = ()
) -> Iterator[Loop]:
    """Variants under approximate layouts, with so many steps of warm-up; None stands for all steps.

    Without ``layouts`` they are PipeFusion and displaced patch on several ranks, and PipeFusion with one patch, which
    is exact by itself.
    """
    sigmas = SIGMAS if warmup is not None else SIGMAS[::3] + SIGMAS[-1:]
    steps = len(sigmas) - 1 if warmup is None else warmup
    texts = [text.format(ranks) for ranks in RANKS for text in WRITTEN]
    warmed = [replace(layout, warmup=steps) for layout in layouts or map(ParallelLayout.parse, texts)]
    alone = [ParallelLayout(pipe=ranks, patches=1) for ranks in RANKS if warmup is None and not layouts]
    for class_name, name in call_kinds:
        for layout in (*warmed, *alone):
            yield Loop(class_name=class_name, variant=name, layout=layout, sigmas=sigmas)


class LoopCells:
    """Asks a backend for step loops of small models, which are kept in a folder."""

    def __init__(self, client: Client, devices: Devices, folder: Path) -> None:
        self.client, self.devices, self.folder = client, devices, folder

    def ask(self, loop: Loop) -> Report:
        """Compare."""
        message = loop.message(self._path(loop.class_name, loop.variant), self.devices)
        try:
            tensors = loop.tensors()
            checkpoint = Checkpoint.open(message.model.path)
            plan = check_sample(message, describe(tensors), checkpoint, len(self.devices.indices))
        except InvalidRequest as error:
            return Report(cell=str(loop), skipped=str(error))
        model = family(loop.class_name, loop.variant)
        one = wanted(lambda _: model, message, tensors, plan)
        got = self.client.call(message, tensors)
        references = [one, self._exact(message, tensors)] if loop.exact else [one]
        difference = max((got["samples"] - reference).abs().max() for reference in references)
        return Report(
            cell=str(loop),
            tolerance=TOLERANCE,
            max_abs_error=float(difference),
            max_rel_error=float(difference / one.abs().max()),
            bytes_sent_per_rank=tuple(got["sent_bytes"].tolist()),
            bytes_formula_per_rank=formula(loop, message, tensors, plan),
            seconds_per_step=float(got["seconds"]) / (len(loop.sigmas) - 1),
        )

    def _exact(self, message: Sample, tensors: Mapping[str, Tensor]) -> Tensor:
        """What one rank of the exact engine makes of a request."""
        alone = replace(message, model=replace(message.model, layout=ParallelLayout()), measure=False, timed=False)
        return self.client.call(alone, tensors)["samples"]

    def _path(self, class_name: str, name: str) -> Path:
        path = self.folder / f"{class_name} {name}"
        return path if path.is_dir() else examples.write(path, module(class_name, name))


def formula(loop: Loop, message: Sample, tensors: Mapping[str, Tensor], plan: DenoisingPlan) -> tuple[int, ...]:
    """The bytes that each rank should send in a step loop of patches of equal speed: what its calls send, rank 0 with
    each of them whether to go on, and the first ranks of other data groups their samples."""
    layout, asks = plan.layout, dry(SAMPLERS[message.sampler], tensors["sigmas"])
    job = plan.workload(stages=stages_of(family(loop.class_name, loop.variant), layout))
    whole = whole_calls([ask.step for ask in asks], [""] * len(asks), layout.warmup)
    calls = call_kinds(layout.stale, whole)
    if layout.pipe > 1 and layout.patches != 1:  # patches gather in the last call, too
        calls = [kind if kind is CallKind.EVERYTHING else CallKind.GATHERED for kind in call_kinds("previous", whole)]
    by_rank = []
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        sent = sum(_of_call(kind, layout, job, rank) for kind in calls)
        sent += len(calls) * (layout.ranks - 1) * _FLAG if rank == 0 else 0
        if rank and not any(index for axis, index in place.items() if axis != "data"):
            sent += next(job.own(layout, place))[0] * job.latent * tensors["x"].itemsize
        by_rank.append(sent)
    return tuple(by_rank)


def _of_call(kind: CallKind, layout: ParallelLayout, job: Workload, rank: int) -> int:
    attention = [each for each in STRATEGIES if isinstance(each, (Ulysses, Ring))]
    sent = sum(strategy.bytes_sent(layout, job, rank) for strategy in STRATEGIES if strategy not in attention)
    if kind is CallKind.EVERYTHING:
        return sent + sum(strategy.bytes_sent(layout, job, rank) for strategy in attention)
    if kind is CallKind.ALONE:
        return sent + _alone(layout, job, rank)
    gathered = displaced.bytes_sent(layout, job, rank) if kind is not CallKind.LAST else 0
    return sent + Ulysses().bytes_sent(layout, job, rank) + gathered


def _alone(layout: ParallelLayout, job: Workload, rank: int) -> int:
    """What Ulysses sends in a patch that sees no other: its exchanges are those of a job of the patch's size."""
    place = layout.coordinates(rank)
    inner = replace(layout, ring=1, stale="", balance=())
    there = place | {"ring": 0, "sequence": place["ulysses"]}
    (rank_in_patch,) = [other for other in range(inner.ranks) if inner.coordinates(other) == there]
    begin, branches = place["ring"] * layout.ulysses, []
    for samples, extent in job.branches:
        own = sum(job.sizes(layout, extent, IMAGE)[begin : begin + layout.ulysses])
        branches.append((samples, replace(extent, streams={**extent.streams, IMAGE: own})))
    return Ulysses().bytes_sent(inner, replace(job, branches=tuple(branches)), rank_in_patch)


@lru_cache(maxsize=2)
def module(class_name: str, name: str) -> Any:
    """The diffusers module of a variant."""
    return examples.random_module(class_name, config(class_name, name))


def config(class_name: str, name: str) -> Mapping[str, Any]:
    """The config of a variant, with ``LAYERS`` layers or more."""
    small = examples.variant(class_name, name).config
    few = FAMILIES[class_name].describe(small).layers < LAYERS
    return {**small, "num_layers": LAYERS} if few else small


def family(class_name: str, name: str) -> Family:
    """It in its family's three parts."""
    return FAMILIES[class_name](module(class_name, name))
