"""What a request must look like, checked on every rank alike from its header, before any weight is loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .errors import InvalidRequest
from .layout import ParallelLayout, auto
from .messages import Forward, Sample
from .models import Family, Geometry, family_of
from .samplers import SAMPLERS
from .strategies import STRATEGIES, Job
from .wire import TensorMeta

Shape = tuple[int, ...]
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """A checked ``Forward`` or ``Sample``: what is computed, known on every rank.

    Attributes:
        latents: the latent's shape ``[B, C, T, H, W]`` per branch.
    """

    layout: ParallelLayout
    geometry: Geometry
    latents: tuple[Shape, ...]

    @property
    def branches(self) -> int:
        """Number of branches that are computed."""
        return len(self.latents)

    def tokens(self, branch: int) -> int:
        """Tokens of a branch's latent."""
        return math.prod(self.geometry.grid(self.latents[branch][2:]))

    def job(self, itemsize: int = 4) -> Job:
        """The numbers that strategies ask for; ``itemsize`` is that of the model's dtype, in bytes."""
        return Job(
            branches=self.branches,
            samples=max(shape[0] for shape in self.latents),
            tokens=max(map(self.tokens, range(self.branches))),
            heads=self.geometry.heads,
            head_dim=self.geometry.head_dim,
            layers=self.geometry.layers,
            values=self.geometry.values,
            itemsize=itemsize,
        )


def check_forward(message: Forward, metas: Sequence[TensorMeta], checkpoint: Checkpoint, world_size: int) -> Denoising:
    """Check a ``Forward``.

    Raises:
        InvalidRequest: one sentence that names the value and what would work.
    """
    family, config, geometry = _family(checkpoint)
    if message.branches < 1:
        raise InvalidRequest(f"branches={message.branches}: a forward needs at least one branch")
    branches, rest = split_names({meta.name: meta.shape for meta in metas}, message.branches)
    _refuse_names(rest, "a forward takes {branch}.{argument} alone")
    _check_floats(metas)
    for shapes in branches:
        _check_names(shapes, family.inputs)
        latent, timestep = shapes[family.latent], shapes[family.timestep]
        _check_latent(latent, geometry)
        if timestep != latent[:1]:
            raise InvalidRequest(f"timestep of shape {list(timestep)}: one a sample is needed, {list(latent[:1])}")
        _check_conditioning(family, config, shapes, latent[0])
    return _denoising(message, geometry, [shapes[family.latent] for shapes in branches], world_size)


def check_sample(message: Sample, metas: Sequence[TensorMeta], checkpoint: Checkpoint, world_size: int) -> Denoising:
    """Check a ``Sample``.

    Raises:
        InvalidRequest: one sentence that names the value and what would work.
    """
    family, config, geometry = _family(checkpoint)
    if message.sampler not in SAMPLERS:
        raise InvalidRequest(
            f"sampler {message.sampler!r} is not one of ParallelSampler's ({', '.join(SAMPLERS)}); "
            "KSampler has all of ComfyUI's and works on the same MODEL"
        )
    branches, rest = split_names({meta.name: meta.shape for meta in metas}, message.branches)
    _check_guidance(message)
    _check_floats(metas)
    latent = _check_loop_tensors(rest, geometry)
    names = tuple(name for name in family.inputs if name not in (family.latent, family.timestep))
    for shapes in branches:
        _check_names(shapes, names)
        _check_conditioning(family, config, shapes, latent[0])
    computed = 1 if message.cfg == 1.0 else message.branches
    return _denoising(message, geometry, [latent] * computed, world_size)


def first_not_finite(tensors: Mapping[str, Tensor]) -> int:
    """Index of the first tensor that holds NaN or infinity, else -1."""
    for index, tensor in enumerate(tensors.values()):
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return index
    return -1


def split_names(named: Mapping[str, Any], branches: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sort ``{i}.{name}`` into branches; what has no branch number stays in the second part."""
    split: list[dict[str, Any]] = [{} for _ in range(max(branches, 0))]
    rest = {}
    for name, value in named.items():
        branch, dot, argument = name.partition(".")
        if dot and branch.isdecimal() and int(branch) < branches:
            split[int(branch)][argument] = value
        else:
            rest[name] = value
    return split, rest


def _family(checkpoint: Checkpoint) -> tuple[type[Family], dict[str, Any], Geometry]:
    family = family_of(checkpoint.components["transformer"])
    config = checkpoint.config("transformer")
    return family, config, family.describe(config)


def _denoising(message: Forward | Sample, geometry: Geometry, latents: list[Shape], world_size: int) -> Denoising:
    ranks = min(world_size, len(message.model.devices.indices))
    layout = message.model.layout or auto(ranks, branches=len(latents))
    layout.check_fits(ranks)
    checked = Denoising(layout=layout, geometry=geometry, latents=tuple(latents))
    for strategy in STRATEGIES:
        strategy.check(layout, checked.job())
    return checked


def _check_latent(shape: Shape, geometry: Geometry) -> None:
    if len(shape) != 5 or shape[0] < 1:
        raise InvalidRequest(
            f"a latent of shape {list(shape)}: this model takes [batch, channels, frames, height, width]"
        )
    if shape[1] != geometry.in_channels:
        raise InvalidRequest(
            f"the latent has {shape[1]} channels and this model takes {geometry.in_channels}: "
            "use an empty latent or a VAE that belong to this model"
        )
    if any(length < patch for length, patch in zip(shape[2:], geometry.patch, strict=True)):
        raise InvalidRequest(
            f"a latent of {shape[2]} frames of {shape[3]} x {shape[4]} is smaller than one patch of this model, "
            f"{geometry.patch[0]} x {geometry.patch[1]} x {geometry.patch[2]}"
        )
    if max(geometry.grid(shape[2:])) > geometry.positions:
        raise InvalidRequest(
            f"a latent of {shape[2]} frames of {shape[3]} x {shape[4]} is {max(geometry.grid(shape[2:]))} patches "
            f"long on one side, and this model has positions for {geometry.positions}"
        )


def _check_loop_tensors(shapes: Mapping[str, Shape], geometry: Geometry) -> Shape:
    inpainting = [name for name in ("mask", "noise", "latent") if name in shapes]
    wanted = {"x", "sigmas", *inpainting}
    if not wanted <= shapes.keys() or len(inpainting) not in (0, 3):
        raise InvalidRequest("sampling needs x and sigmas, and for inpainting mask, noise and latent together")
    _refuse_names(shapes.keys() - wanted, "sampling takes x, sigmas, mask, noise, latent and {branch}.{argument}")
    x = shapes["x"]
    _check_latent(x, geometry)
    if len(shapes["sigmas"]) != 1 or shapes["sigmas"][0] < 2:
        raise InvalidRequest(f"sigmas of shape {list(shapes['sigmas'])}: at least one step is needed, so two sigmas")
    for name in inpainting:
        if len(shapes[name]) != 5 or any(a not in (1, b) for a, b in zip(shapes[name], x, strict=True)):
            raise InvalidRequest(f"{name} of shape {list(shapes[name])} does not broadcast to the latent's {list(x)}")
    return x


def _check_guidance(message: Sample) -> None:
    if message.branches not in (1, 2) or not math.isfinite(message.cfg):
        raise InvalidRequest(f"cfg={message.cfg} with {message.branches} branches: one or two and a finite cfg work")
    if message.branches == 1 and message.cfg != 1.0:
        raise InvalidRequest(f"cfg={message.cfg} needs a negative conditioning as a second branch; cfg=1.0 does not")


def _check_conditioning(
    family: type[Family], config: Mapping[str, Any], shapes: Mapping[str, Shape], batch: int
) -> None:
    for name, shape in shapes.items():
        if not shape or shape[0] != batch:
            raise InvalidRequest(f"{name} of shape {list(shape)} does not fit a latent batch of {batch}")
    family.check(config, shapes)


def _check_names(shapes: Mapping[str, Shape], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise InvalidRequest(f"a branch lacks {', '.join(missing)}; it needs {', '.join(wanted)}")
    _refuse_names(shapes.keys() - set(wanted), f"this model takes {', '.join(wanted)}")


def _refuse_names(names: Any, known: str) -> None:
    if names:
        raise InvalidRequest(f"{', '.join(sorted(names))} cannot be used: {known}")


def _check_floats(metas: Sequence[TensorMeta]) -> None:
    for meta in metas:
        if meta.dtype not in _FLOATS:
            raise InvalidRequest(f"{meta.name} is {meta.dtype}; it needs to be one of {', '.join(_FLOATS)}")
