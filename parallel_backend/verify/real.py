"""Comparisons of a real checkpoint, whose stock forward runs in this process before any rank starts."""

import gc
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..checkpoint.opening import open_checkpoint
from ..distributed import bfloat16, mesh
from ..errors import InvalidRequest, OutOfMemory
from ..families.modules import module_class_of
from ..families.registry import family_of
from ..interfaces.family import Family
from ..interfaces.geometry import LATENT, TIMESTEP
from ..interfaces.input_shapes import input_shapes
from ..interfaces.strategy import ParameterShapes
from ..layout.choice import auto
from ..layout.parallel_layout import ParallelLayout
from ..loading import load
from ..loading.transformer_part import load_transformer
from ..protocol.model_spec import Devices, DType
from ..protocol.tensors import NAMES
from . import examples
from .report import TOLERANCE
from .run import Comparison, block_parameters, forward_request, plan, stages_of

BATCH, BRANCHES = 2, 2
"""Samples and branches to compute: two of each, so that data and cfg axes have something to split."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """A checkpoint and seeded inputs for it.

    Attributes:
        checkpoint: the checkpoint.
        variant: name of the family's variant whose inputs the model accepts.
        inputs: by branch.
        dtype: dtype to compute in.
        component: the transformer that the timesteps of the inputs select.
    """

    checkpoint: Checkpoint
    variant: str
    inputs: tuple[dict[str, Tensor], ...]
    dtype: DType
    component: str = HIGH_NOISE

    def experts(self) -> list["RealModel"]:
        """Return one model per transformer of the checkpoint, with timesteps on its side of the boundary."""
        boundary = self.checkpoint.boundary()
        if boundary is None:
            return [self]
        high = tuple(one | {TIMESTEP: torch.full_like(one[TIMESTEP], 1000.0)} for one in self.inputs)
        return [replace(self, inputs=high), replace(self, component=LOW_NOISE)]

    def describe(self, devices: Devices) -> str:
        """Describe what is compared, as text."""
        latent, name = self.inputs[0][LATENT].shape, self.checkpoint.components["transformer"]
        return (
            f"{self.checkpoint.path}: {name} in {self.dtype} on {devices}, compared with "
            "diffusers' own forward in one process\n"
            f"random inputs of the {examples.short_name(name)} variant {self.variant!r}: "
            f"{len(self.inputs)} prompts, batch {latent[0]}, latent {'x'.join(map(str, latent[2:]))}"
        )

    def comparisons(self, layouts: Sequence[ParallelLayout], device: torch.device) -> list[Comparison]:
        """Run the stock forward on a device, and return a comparison with it for each layout.

        Raises:
            OutOfMemory: the whole model does not fit on the device.
        """
        try:
            stock = self._run_stock(device, layouts)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"diffusers' own forward, with which the layouts are compared, needs all of {self.component} on "
                f"{device}, which is too small for it ({error}); a smaller --size or a larger GPU would work"
            ) from error
        return [
            Comparison(
                title=f"{self.component}, {layout}" if self.checkpoint.boundary() else str(layout),
                model=self.checkpoint.path, layout=layout, inputs=self.inputs,
                stock=stock.predictions.__getitem__, parameters=stock.parameters, stages=stages, dtype=self.dtype,
                tolerance=tolerance(getattr(torch, self.dtype), stock.blocks),
            )
            for layout, stages in zip(layouts, stock.stages, strict=True)
        ]  # fmt: skip

    def check(self, layout: ParallelLayout, devices: Devices) -> None:
        """Refuse an impossible layout before anything is loaded.

        Raises:
            InvalidRequest: the layout is impossible; the message names the reason and what would work.
        """
        plan(forward_request(self.checkpoint.path, self.dtype, layout, devices, len(self.inputs)), self.inputs)

    @torch.no_grad()
    def _run_stock(self, device: torch.device, layouts: Sequence[ParallelLayout]) -> "_StockRun":
        dtype = getattr(torch, self.dtype)
        family = load_transformer(self.checkpoint, dtype, device, mesh.alone(), self.component)
        predictions = [family.stock({k: v.to(device) for k, v in one.items()}).cpu() for one in self.inputs]
        stock = _StockRun(
            predictions=predictions,
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
class _StockRun:
    """What comparisons need of the whole model, which is freed after its run.

    Attributes:
        predictions: by branch.
        parameters: shapes of the weights of all blocks.
        blocks: number of blocks.
        stages: by layout, see ``Comparison.stages``.
    """

    predictions: list[Tensor]
    parameters: ParameterShapes
    blocks: int
    stages: list[tuple[tuple[int, ...], ...]]


def tolerance(dtype: torch.dtype, blocks: int) -> float:
    """Return the largest relative error at which two forwards in a dtype count as equal.

    Each forward rounds its tokens once per block. The rounding errors are random, so they add up to the square root of
    the number of blocks times the dtype's epsilon. Both forwards round, which doubles that. In float32 the result is
    below ``TOLERANCE``, which then applies.
    """
    return max(TOLERANCE, 2 * torch.finfo(dtype).eps * math.sqrt(blocks))


def open_real(
    model: str, dtype: DType, size: Sequence[int] | None, text: int | None, device: torch.device
) -> RealModel:
    """Read a checkpoint's config and create inputs for it, without loading weights.

    Args:
        model: see ``find_folder``.
        dtype: dtype to compute in.
        size: of the latent; None for a variant's own.
        text: text tokens; None for a variant's own.
        device: where the stock forward will run; decides what dtype ``auto`` is.

    Raises:
        InvalidRequest: there is no such model, it is not supported, or it accepts the inputs of none of its family's
            variants.
    """
    checkpoint = open_checkpoint(find_folder(model))
    class_name = checkpoint.components["transformer"]
    family = family_of(class_name)
    load.check_component(checkpoint, "transformer")
    config = _with_defaults(class_name, checkpoint.config("transformer"))
    name, shapes = _matching_variant(family, config, size, text)
    return RealModel(
        checkpoint=checkpoint,
        variant=name,
        inputs=tuple(examples.fill(one, seed) for seed, one in enumerate(shapes)),
        dtype=NAMES[load.resolve_dtype(checkpoint, dtype, device, bfloat16=bfloat16.native(device))],  # type: ignore[arg-type]
    )


def layouts_on(ranks: int) -> list[ParallelLayout]:
    """Return what auto chooses, and each strategy alone on all ranks; cfg and data on two, as there is work for two."""
    if ranks == 1:
        return [ParallelLayout()]
    alone = ["cfg=2", "data=2", *(f"{axis}={ranks}" for axis in ("ulysses", "ring", "tensor", "pipe"))]
    texts = [str(auto((ranks,), branches=BRANCHES)), *alone, f"ulysses={ranks} shard_weights"]
    return [ParallelLayout.parse(text) for text in dict.fromkeys(texts)]


def find_folder(model: str) -> Path:
    """Find a checkpoint by its folder, or by its name in ``checkpoints`` or in ComfyUI's ``models/diffusers``.

    Raises:
        InvalidRequest: there is no such folder.
    """
    extension = Path(__file__).resolve().parents[2]
    comfyui = Path(os.environ.get("COMFYUI_PATH") or extension.parents[1])
    places = [Path(model), extension / "checkpoints" / model, comfyui / "models" / "diffusers" / model]
    existing = [place for place in places if place.is_dir()]
    if not existing:
        raise InvalidRequest(
            f"no model {model!r}: a folder in diffusers layout, or the name of one in {places[1].parent} or "
            f"{places[2].parent} would work"
        )
    return existing[0]


def _with_defaults(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a config with the defaults of its class."""
    parameters = inspect.signature(module_class_of(class_name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(config)


def _matching_variant(
    family: type[Family], config: Mapping[str, Any], size: Sequence[int] | None, text: int | None
) -> tuple[str, list[Shapes]]:
    """Return the family's first variant whose inputs a model with this config accepts, and their shapes by branch."""
    dims = len(family.describe(config).patch)
    if size is not None and len(size) != dims:
        form = "TxHxW" if dims == 3 else "HxW"
        raise InvalidRequest(f"--size {'x'.join(map(str, size))}: latents of this model are {form}")
    refusals = []
    for name, variant in family.variants().items():
        length = text or variant.text
        lengths = (length, length if variant.fixed_text else max(1, length - 2))
        try:
            shapes = [
                input_shapes(family, config, variant.inputs, batch=BATCH, size=size or variant.size, text=tokens)
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
