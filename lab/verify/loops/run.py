"""Step loops of approximate layouts, compared with the same algorithm in one process and with the exact loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.denoiser.plan import DenoisingPlan
from parallel_backend.engine.validation import check_sample
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces import patch_plan
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.interfaces.strategy import Workload
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from parallel_backend.step_loop.request_sampler import RequestSampler
from parallel_backend.step_loop.schedule import CallKind, call_kinds, whole_calls
from parallel_backend.strategies import STRATEGIES, displaced
from parallel_backend.strategies.ring import Ring
from parallel_backend.strategies.ulysses import Ulysses
from parallel_backend.verify import examples
from parallel_backend.verify.examples import short_name
from parallel_backend.verify.report import TOLERANCE, Report
from parallel_backend.verify.run import stages_of

from . import reference
from .reference import LoopRequest, Transformer

SIGMAS = (1.0, 0.93, 0.84, 0.72, 0.58, 0.42, 0.24, 0.1, 0.0)
RANKS = (2, 3, 4)
LAYOUTS = ("pipe={}", "ring={} stale=previous", "ring={} stale=none")
_FLAG = 8
"""Bytes of the flag by which rank 0 tells the others to continue."""
LAYERS = 4
"""Smallest number of layers of a model, so that there can be as many stages."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A step loop of a small model. Its guidance branches differ in text length unless the variant fixes it.

    Attributes:
        class_name: class of diffusers.
        variant: one of the family's variants.
        layout: the layout, including its steps of warm-up.
        sigmas: of the steps, and the last one's end.
        sampler: name of the sampler.
        cfg: guidance scale; 1 computes one branch.
        batch: samples.
        size: of the latent; None for the variant's own.
        text: text tokens; None for the variant's own.
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
        """Whether all of its steps are exact."""
        return not self.layout.approximate or self.layout.warmup >= len(self.sigmas) - 1

    def message(self, model: Path, devices: Devices) -> Sample:
        """Return the request."""
        layout = self.layout
        if not layout.balance:  # equal shares, as in the reference and the formulas, whatever the ranks' speeds
            layout = replace(layout, balance=(1.0,) * (layout.pipe if layout.pipe > 1 else layout.ring))
        spec = ModelSpec(path=str(model), devices=devices, dtype="float32", layout=layout)
        return Sample(
            model=spec, branches=2, sampler=self.sampler, cfg=self.cfg, timestep_scale=1.0, measure="bytes",
            latent_shapes=examples.latent_shapes(self.class_name, self._inputs(0)),
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the request."""
        tensors = {"sigmas": torch.tensor(self.sigmas)}
        for i in range(2):
            x, kept = examples.loop_inputs(self.class_name, self._inputs(i))
            tensors |= {f"{i}.{name}": value for name, value in kept.items()}
            tensors |= {"x": x} if i == 0 else {}
        return tensors

    def _inputs(self, branch: int) -> dict[str, Tensor]:
        """Return the inputs of a branch's forward."""
        variant = examples.variant(self.class_name, self.variant)
        text = self.text or variant.text
        length = text if branch == 0 or variant.fixed_text else max(1, text - 2)
        return examples.inputs(
            self.class_name, self.variant, batch=self.batch, size=self.size, text=length, seed=branch
        )


def reference_samples(
    transformer: Transformer, message: Sample, tensors: Mapping[str, Tensor], plan: DenoisingPlan
) -> Tensor:
    """Return the samples of a request, computed in one process by its layout's algorithm.

    Args:
        transformer: returns the transformer for a timestep.
        message: the request.
        tensors: of the request.
        plan: of the request; its layout selects the algorithm.
    """
    layout = plan.layout
    image = patch_plan.image_patches(plan.extents, patch_plan.patch_count(layout, plan.extents))
    request = LoopRequest(transformer, message, tensors, layout.warmup)
    return reference.displaced(request, layout, image.total) if layout.stale else reference.pipefusion(request, image)


def loops(
    pairs: Sequence[tuple[str, str]], warmup: int | None, layouts: Sequence[ParallelLayout] = ()
) -> Iterator[Loop]:
    """Yield the step loops of variants in approximate layouts.

    Args:
        pairs: class names and variants.
        warmup: exact steps at the start; None for all steps.
        layouts: if empty, PipeFusion, displaced patch and naive patch on 2, 3 and 4 ranks, and if all steps are exact,
            also PipeFusion with a single patch, which is exact without warm-up.
    """
    sigmas = SIGMAS if warmup is not None else SIGMAS[::3] + SIGMAS[-1:]
    steps = len(sigmas) - 1 if warmup is None else warmup
    texts = [text.format(ranks) for ranks in RANKS for text in LAYOUTS]
    warmed = [replace(layout, warmup=steps) for layout in layouts or map(ParallelLayout.parse, texts)]
    single_patch = [ParallelLayout(pipe=ranks, patches=1) for ranks in RANKS if warmup is None and not layouts]
    for class_name, name in pairs:
        for layout in (*warmed, *single_patch):
            yield Loop(class_name=class_name, variant=name, layout=layout, sigmas=sigmas)


class LoopVerifier:
    """Runs step loops of small models on a backend; the models are saved in a folder.

    Their reference loops run in this process, on the first rank's device.
    """

    def __init__(self, client: Client, devices: Devices, folder: Path) -> None:
        self.client, self.devices, self.folder = client, devices, folder
        self.device = torch.device(devices.of_rank(0))

    def compare(self, loop: Loop) -> Report:
        """Compare a step loop with one process."""
        message = loop.message(self._path(loop.class_name, loop.variant), self.devices)
        try:
            tensors = loop.tensors()
            checkpoint = open_checkpoint(message.model.path)
            plan = check_sample(message, describe(tensors), checkpoint, len(self.devices.indices))
        except InvalidRequest as error:
            return Report(cell=str(loop), skipped=str(error))
        module(loop.class_name, loop.variant).to(self.device)
        model = family(loop.class_name, loop.variant)
        with self.device:  # what the loop creates, such as indices, is on this device, too
            local = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            expected = reference_samples(lambda _: model, message, local, plan).cpu()
        reply = self.client.call(message, tensors)
        references = [expected, self._exact(message, tensors)] if loop.exact else [expected]
        difference = max((reply["samples"] - samples).abs().max() for samples in references)
        return Report(
            cell=str(loop),
            tolerance=TOLERANCE,
            max_abs_error=float(difference),
            max_rel_error=float(difference / expected.abs().max()),
            bytes_sent_per_rank=tuple(reply["sent_bytes"].tolist()),
            bytes_formula_per_rank=expected_bytes(loop, message, tensors, plan),
            seconds_per_step=float(reply["seconds"]) / (len(loop.sigmas) - 1),
        )

    def _exact(self, message: Sample, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the samples of a request from a single rank, which computes exactly."""
        alone = replace(message, model=replace(message.model, layout=ParallelLayout()), measure="")
        return self.client.call(alone, tensors)["samples"]

    def _path(self, class_name: str, name: str) -> Path:
        path = self.folder / f"{class_name} {name}"
        return path if path.is_dir() else examples.write_checkpoint(path, module(class_name, name))


def expected_bytes(loop: Loop, message: Sample, tensors: Mapping[str, Tensor], plan: DenoisingPlan) -> tuple[int, ...]:
    """Return the bytes that each rank should send in a step loop, if all ranks are equally fast.

    These are the bytes of its model calls; for rank 0 also the flag before each call; for the first rank of each other
    data group also its samples.
    """
    layout, model_calls = plan.layout, RequestSampler(message, tensors["sigmas"], tensors["x"].shape).calls()
    workload = plan.workload(stages=stages_of(family(loop.class_name, loop.variant), layout))
    whole = whole_calls([call.step for call in model_calls], [""] * len(model_calls), layout.warmup)
    calls = call_kinds(layout.stale, whole)
    if layout.pipe > 1 and layout.patches != 1:  # in a pipeline the last call gathers, too
        calls = [kind if kind is CallKind.EVERYTHING else CallKind.GATHERED for kind in call_kinds("previous", whole)]
    by_rank = []
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        sent = sum(_of_call(kind, layout, workload, rank) for kind in calls)
        sent += len(calls) * (layout.ranks - 1) * _FLAG if rank == 0 else 0
        if rank and not any(index for axis, index in place.items() if axis != "data"):
            sent += next(workload.local_branches(layout, place))[0] * workload.latent * tensors["x"].itemsize
        by_rank.append(sent)
    return tuple(by_rank)


def _of_call(kind: CallKind, layout: ParallelLayout, workload: Workload, rank: int) -> int:
    """Return the bytes that a rank sends in one model call."""
    attention = [strategy for strategy in STRATEGIES if isinstance(strategy, (Ulysses, Ring))]
    sent = sum(strategy.bytes_sent(layout, workload, rank) for strategy in STRATEGIES if strategy not in attention)
    if kind is CallKind.EVERYTHING:
        return sent + sum(strategy.bytes_sent(layout, workload, rank) for strategy in attention)
    if kind is CallKind.ALONE:
        return sent + _alone(layout, workload, rank)
    gathered = displaced.bytes_sent(layout, workload, rank) if kind is not CallKind.LAST else 0
    return sent + Ulysses().bytes_sent(layout, workload, rank) + gathered


def _alone(layout: ParallelLayout, workload: Workload, rank: int) -> int:
    """Return the bytes that Ulysses sends for an isolated patch: the bytes of a workload of the patch's size."""
    place = layout.coordinates(rank)
    inner = replace(layout, ring=1, stale="", balance=())
    inner_place = place | {"ring": 0, "sequence": place["ulysses"]}
    (inner_rank,) = [other for other in range(inner.ranks) if inner.coordinates(other) == inner_place]
    begin, branches = place["ring"] * layout.ulysses, []
    for samples, extent in workload.branches:
        patch = sum(workload.tokens_by_rank(layout, extent, IMAGE)[begin : begin + layout.ulysses])
        branches.append((samples, replace(extent, streams={**extent.streams, IMAGE: patch})))
    return Ulysses().bytes_sent(inner, replace(workload, branches=tuple(branches)), inner_rank)


@lru_cache(maxsize=2)
def module(class_name: str, name: str) -> Any:
    """Return the diffusers module of a variant, with random weights."""
    return examples.random_module(class_name, config(class_name, name))


def config(class_name: str, name: str) -> Mapping[str, Any]:
    """Return the config of a variant, with at least ``LAYERS`` layers."""
    original = examples.variant(class_name, name).config
    too_few = family_of(class_name).describe(original).layers < LAYERS
    number = "depth" if "depth" in original else "num_layers"
    return {**original, number: LAYERS} if too_few else original


def family(class_name: str, name: str) -> Family:
    """Return the module of a variant in its family's three parts."""
    return family_of(class_name)(module(class_name, name))
