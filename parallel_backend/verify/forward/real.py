"""Questions about a real checkpoint, whose stock forward runs here before any rank starts."""

import gc
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.checkpoint import HIGH, LOW, Checkpoint
from ...client import devices as device_list
from ...distributed import mesh
from ...errors import InvalidRequest, OutOfMemory
from ...interfaces.family import Family
from ...interfaces.geometry import LATENT, TIMESTEP
from ...interfaces.strategy import Parameters
from ...layout.parallel_layout import ParallelLayout, auto
from ...loading import load
from ...models import family_of
from ...protocol.messages import Devices, DType
from ...protocol.tensors import NAMES
from . import examples
from .run import TOLERANCE, Question, block_parameters, check, forward, stages_of

BATCH, BRANCHES = 2, 2
"""Samples and branches that are computed, so that every axis has something to share out."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Real:
    """A checkpoint and seeded inputs for it.

    Attributes:
        variant: the family's whose inputs the model takes.
        inputs: by branch; ``dtype``: that to compute in.
        component: the transformer that the inputs' timesteps are for.
    """

    checkpoint: Checkpoint
    variant: str
    inputs: tuple[dict[str, Tensor], ...]
    dtype: DType
    component: str = HIGH

    def experts(self) -> list["Real"]:
        """The same for each transformer of the checkpoint, with timesteps on its side of the boundary."""
        boundary = self.checkpoint.boundary()
        if boundary is None:
            return [self]
        high = tuple(one | {TIMESTEP: torch.full_like(one[TIMESTEP], 1000.0)} for one in self.inputs)
        return [replace(self, inputs=high), replace(self, component=LOW)]

    def describe(self, devices: Devices) -> str:
        """What is compared, for people."""
        latent, name = self.inputs[0][LATENT].shape, self.checkpoint.components["transformer"]
        kind = "GPUs" if devices.kind == "cuda" else "CPU ranks"
        return (
            f"{self.checkpoint.path}: {name} in {self.dtype} on {len(devices.indices)} {kind}, against diffusers' own "
            f"forward in one process\nrandom inputs as for {examples.short_name(name)} {self.variant!r}: "
            f"{len(self.inputs)} prompts, batch {latent[0]}, latent {'x'.join(map(str, latent[2:]))}"
        )

    def questions(self, layouts: Sequence[ParallelLayout], device: torch.device) -> list[Question]:
        """The stock forward's predictions, and which layouts shall give them.

        Raises:
            OutOfMemory: the device does not hold the whole model.
        """
        try:
            stock = self._stock(device, layouts)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"diffusers' own forward, which the layouts are held to, needs all of {self.component} on {device}, "
                f"which is too small for it ({error}); a smaller --size or a larger GPU would work"
            ) from error
        return [
            Question(
                title=f"{self.component}, {layout}" if self.checkpoint.boundary() else str(layout),
                model=self.checkpoint.path, layout=layout, inputs=self.inputs,
                stock=stock.wanted.__getitem__, parameters=stock.parameters, stages=stages, dtype=self.dtype,
                tolerance=tolerance(getattr(torch, self.dtype), stock.blocks),
            )
            for layout, stages in zip(layouts, stock.stages, strict=True)
        ]  # fmt: skip

    def check(self, layout: ParallelLayout, devices: Devices) -> None:
        """Refuse a layout that cannot be, before anything is loaded.

        Raises:
            InvalidRequest: names the reason and what would work.
        """
        check(forward(self.checkpoint.path, self.dtype, layout, devices, len(self.inputs)), self.inputs)

    @torch.no_grad()
    def _stock(self, device: torch.device, layouts: Sequence[ParallelLayout]) -> "_Stock":
        alone = mesh.create(ParallelLayout(), rank=0, timeout=timedelta(seconds=1))
        assert alone is not None
        family = load.load_transformer(self.checkpoint, getattr(torch, self.dtype), device, alone, self.component)
        wanted = [family.stock({k: v.to(device) for k, v in one.items()}).cpu() for one in self.inputs]
        stock = _Stock(
            wanted=wanted,
            parameters=block_parameters(family),
            blocks=len(family.blocks),
            stages=[stages_of(family, layout) for layout in layouts],
        )
        del family
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return stock


@dataclass(frozen=True, kw_only=True)
class _Stock:
    """What the whole model, which is let go of again, predicts and is made of; ``stages`` are by layout."""

    wanted: list[Tensor]
    parameters: Parameters
    blocks: int
    stages: list[tuple[tuple[int, ...], ...]]


def tolerance(dtype: torch.dtype, blocks: int) -> float:
    """The relative error up to which two forwards in a dtype count as equal.

    Each rounds its tokens once a block, at random, so that they part by the root of the number of blocks times the
    dtype's step, twice since both do; in float32 that is below ``TOLERANCE``, which stands.
    """
    return max(TOLERANCE, 2 * torch.finfo(dtype).eps * math.sqrt(blocks))


def open_real(model: str, dtype: DType, size: Sequence[int] | None, text: int | None, device: torch.device) -> Real:
    """Read a checkpoint's config and make inputs for it; no weight is loaded.

    Raises:
        InvalidRequest: there is no such model, it is not supported, or no inputs of its family fit it.
    """
    checkpoint = Checkpoint.open(folder(model))
    class_name = checkpoint.components["transformer"]
    family = family_of(class_name)
    load.check_component(checkpoint, "transformer")
    config = _with_defaults(class_name, checkpoint.config("transformer"))
    name, shapes = _fitting(family, config, size, text)
    return Real(
        checkpoint=checkpoint,
        variant=name,
        inputs=tuple(examples.fill(one, seed) for seed, one in enumerate(shapes)),
        dtype=NAMES[load.resolve_dtype(checkpoint, dtype, device)],  # type: ignore[arg-type]
    )


def layouts_on(ranks: int) -> list[ParallelLayout]:
    """What auto gives, and each strategy alone on all ranks; cfg and data on the two that there is work for."""
    if ranks == 1:
        return [ParallelLayout()]
    alone = ["cfg=2", "data=2", *(f"{axis}={ranks}" for axis in ("ulysses", "ring", "tensor", "pipe"))]
    texts = [str(auto(ranks, branches=BRANCHES)), *alone, f"ulysses={ranks} shard_weights"]
    return [ParallelLayout.parse(text) for text in dict.fromkeys(texts)]


def choose_devices(ranks: int | None) -> Devices:
    """The GPUs where there are any, else ranks on the CPU; as many as are asked for, or all.

    Raises:
        InvalidRequest: there are not so many.
    """
    return device_list.resolve("all" if ranks is None else ",".join(map(str, range(ranks))))


def folder(model: str) -> Path:
    """A folder, or the name of one among the shipped checkpoints or under ComfyUI's ``models/diffusers``."""
    extension = Path(__file__).resolve().parents[3]
    comfyui = Path(os.environ.get("COMFYUI_PATH") or extension.parents[1])
    places = [Path(model), extension / "checkpoints" / model, comfyui / "models" / "diffusers" / model]
    found = [place for place in places if place.is_dir()]
    if not found:
        raise InvalidRequest(
            f"no model {model!r}: a folder in diffusers layout, or the name of one in {places[1].parent} or "
            f"{places[2].parent} would work"
        )
    return found[0]


def _with_defaults(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what diffusers takes where it says nothing."""
    import diffusers

    known = inspect.signature(getattr(diffusers, class_name).__init__).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty} | dict(config)


def _fitting(
    family: type[Family], config: Mapping[str, Any], size: Sequence[int] | None, text: int | None
) -> tuple[str, list[Shapes]]:
    """The first of the family's variants whose inputs a model with this config takes, and their shapes by branch."""
    dims = len(family.describe(config).patch)
    if size is not None and len(size) != dims:
        raise InvalidRequest(f"--size {'x'.join(map(str, size))}: a latent of this model has {dims} lengths")
    refusals = []
    for name, variant in family.variants().items():
        length = text or variant.text
        lengths = (length, length if variant.fixed_text else max(1, length - 2))
        try:
            shapes = [
                examples.input_shapes(
                    family, config, variant.inputs, batch=BATCH, size=size or variant.size, text=tokens
                )
                for tokens in lengths
            ]
            for one in shapes:
                family.extent(config, one)
        except InvalidRequest as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        return name, shapes
    raise InvalidRequest(
        f"no example inputs of {family.__name__} fit this model; --size and --text-tokens may help "
        f"({'; '.join(refusals)})"
    )
