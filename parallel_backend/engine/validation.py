"""Checks of a request's header. Every rank runs the same checks, before any weight is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..denoiser.plan import DenoisingPlan, split_names
from ..errors import InvalidRequest
from ..families.registry import family_of
from ..interfaces.family import Family
from ..interfaces.geometry import LATENT, TIMESTEP, Geometry, Shape, Shapes
from ..interfaces.strategy import Workload
from ..layout.choice import auto
from ..layout.parallel_layout import ParallelLayout
from ..layout.suggestions import check_fits, suggestion
from ..protocol.frames import TensorMeta
from ..protocol.messages import POSITION, Forward, Sample
from ..protocol.model_spec import Adapter
from ..protocol.packing import packed_shape
from ..strategies import STRATEGIES
from .cache_validation import check_cached_loop, check_decided, check_position
from .loop_validation import check_settings, check_tensors

_DIMS = ("frames", "height", "width")
_FLOATS = ("float32", "float16", "bfloat16")
_DTYPES = {"_mask": ("bool",), "_labels": ("int64",), POSITION: ("float32",)}
"""Dtypes of inputs by the end of their name; all other inputs are floats."""


def check_forward(
    message: Forward, metas: Sequence[TensorMeta], checkpoint: Checkpoint, world_size: int
) -> DenoisingPlan:
    """Check a ``Forward``.

    Raises:
        InvalidRequest: the request cannot work. The message names the value and what would work.
    """
    family, config, geometry = _family(checkpoint)
    if message.branches < 1:
        raise InvalidRequest(f"branches={message.branches}: a forward needs at least one branch")
    branches, rest = split_names({meta.name: meta.shape for meta in metas}, message.branches)
    check_position(message, rest)
    _refuse_names(rest.keys() - {POSITION}, "a forward takes {branch}.{argument} only")
    _check_dtypes(metas)
    for shapes in branches:
        _check_names(shapes, (*family.latents, TIMESTEP, *family.required), family.optional)
        latent, timestep = shapes[LATENT], shapes[TIMESTEP]
        _check_latent(latent, geometry)
        if timestep != latent[:1] and not (family.frame_timesteps and timestep == (latent[0], *latent[2:-2])):
            raise InvalidRequest(
                f"timestep has shape {list(timestep)}: one timestep a sample is needed, {list(latent[:1])}"
            )
        _check_batch(shapes, latent[0])
    plan = _denoising(message, family, config, branches, world_size, _skipped(message, geometry.layers))
    check_decided(message, plan.layout)
    return plan


def check_sample(
    message: Sample, metas: Sequence[TensorMeta], checkpoint: Checkpoint, world_size: int
) -> DenoisingPlan:
    """Check a ``Sample``.

    Raises:
        InvalidRequest: the request cannot work. The message names the value and what would work.
    """
    family, config, geometry = _family(checkpoint)
    check_settings(message)
    branches, rest = split_names({meta.name: meta.shape for meta in metas}, message.branches)
    _check_dtypes(metas)
    x = check_tensors(message, rest)
    latents = _unpacked(message, family, x)
    _check_latent(latents[LATENT], geometry)
    for shapes in branches:
        _check_names(shapes, family.required, family.optional)
        _check_batch(shapes, x[0])
    computed = branches[:1] if message.cfg == 1.0 else branches
    loops = [{**shapes, **latents} for shapes in computed]
    plan = _denoising(message, family, config, loops, world_size, (frozenset(),) * len(loops))
    check_cached_loop(message, plan.layout)
    return plan


def _unpacked(message: Sample, family: type[Family], x: Shape) -> dict[str, Shape]:
    """Return the shapes of the latents that ``x`` holds, by their inputs' names."""
    shapes = message.latent_shapes or (x[1:],)
    positive = all(size > 0 for shape in message.latent_shapes for size in shape)
    if not x or not positive or len(shapes) != len(family.latents) or packed_shape(shapes) != x[1:]:
        raise InvalidRequest(
            f"x of shape {list(x)} with latents of {', '.join(str(list(shape)) for shape in shapes)}: this model "
            f"takes {len(family.latents)} ({', '.join(family.latents)}), packed in that order"
        )
    return {name: (x[0], *shape) for name, shape in zip(family.latents, shapes, strict=True)}


def read_shapes(tensors: Mapping[str, Tensor], component: str, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a ``ReadWeights``, by ComfyUI's names.

    Raises:
        InvalidRequest: there are none, or the model lacks the component.
    """
    if component not in (HIGH_NOISE, LOW_NOISE, "text_encoder") or component not in checkpoint.components:
        raise InvalidRequest(f"{checkpoint.name} has no {component!r} whose weights can be changed")
    try:
        listed = msgspec.json.decode(bytes(tensors["shapes"].tolist()), type=dict[str, tuple[int, ...]])
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"reading weights needs the shapes of all weights as JSON ({error})") from error
    return listed


def _family(checkpoint: Checkpoint) -> tuple[type[Family], dict[str, Any], Geometry]:
    family = family_of(checkpoint.components["transformer"])
    config = checkpoint.config("transformer")
    checkpoint.boundary()
    return family, config, family.describe(config)


def _denoising(
    message: Forward | Sample,
    family: type[Family],
    config: Mapping[str, Any],
    branches: Sequence[Shapes],
    world_size: int,
    skipped: tuple[frozenset[int], ...],
) -> DenoisingPlan:
    if message.model.compile != "off" and message.measure == "bytes":
        raise InvalidRequest("compile=blocks hides from a count what ranks send: count bytes with compile=off")
    devices = message.model.devices.first(world_size)
    ranks, geometry, compiles = len(devices.indices), family.describe(config), message.model.compile != "off"
    extents = tuple(family.extent(config, shapes) for shapes in branches)
    rows = min(shapes[LATENT][0] * extent.rows for shapes, extent in zip(branches, extents, strict=True))
    layout = message.model.layout or auto(
        devices.host_sizes, branches=len(branches), rows=rows if geometry.within_frames and not compiles else 0
    )
    if compiles and layout.dsp > 1:
        raise InvalidRequest(f'compile=blocks does not work with layout "{layout}": use ulysses, or compile=off')
    adapters = _adapters(message, len(branches))
    plan = DenoisingPlan(
        layout=layout,
        geometry=geometry,
        samples=tuple(shapes[LATENT][0] for shapes in branches),
        latents=tuple({name: shapes[name][1:] for name in family.latents} for shapes in branches),
        extents=extents,
        alike=tuple(
            (*sorted(shapes.items()), left, loras)
            for shapes, left, loras in zip(branches, skipped, adapters, strict=True)
        ),
        skipped=skipped,
        adapters=adapters,
        guided=isinstance(message, Sample),
        teacache=family.teacache,
    )
    _check_layout(layout, plan.workload(), ranks)
    return plan


def _adapters(message: Forward | Sample, branches: int) -> tuple[tuple[Adapter, ...], ...]:
    """Return the LoRAs of each branch."""
    if isinstance(message, Sample):
        return (message.adapters,) * branches
    if len(message.adapters) not in (0, branches):
        raise InvalidRequest(f"LoRAs are given for {len(message.adapters)} branches, and there are {branches}")
    return message.adapters or ((),) * branches


def _skipped(message: Forward, layers: int) -> tuple[frozenset[int], ...]:
    """Return the blocks that each branch leaves out."""
    if len(message.skipped) not in (0, message.branches):
        raise InvalidRequest(
            f"skipped names the blocks of {len(message.skipped)} branches: it needs those of all {message.branches}, "
            "or of none"
        )
    skipped = message.skipped or ((),) * message.branches
    unknown = sorted({number for numbers in skipped for number in numbers} - set(range(layers)))
    if unknown:
        raise InvalidRequest(f"block {unknown[0]} cannot be skipped: this model has the blocks 0 to {layers - 1}")
    return tuple(map(frozenset, skipped))


def _check_layout(layout: ParallelLayout, workload: Workload, ranks: int) -> None:
    """Refuse a layout that needs more ranks or that a strategy refuses, and name the nearest layouts that work."""

    def works(other: ParallelLayout) -> bool:
        return not is_refused(other, workload)

    check_fits(layout, ranks, works)
    refusal = _refusal(layout, workload)
    if refusal:
        raise InvalidRequest(f"{refusal}; {suggestion(layout, ranks, works)}")


def is_refused(layout: ParallelLayout, workload: Workload) -> bool:
    """Whether a strategy refuses a layout."""
    return _refusal(layout, workload) is not None


def _refusal(layout: ParallelLayout, workload: Workload) -> InvalidRequest | None:
    try:
        for strategy in STRATEGIES:
            strategy.check(layout, workload)
    except InvalidRequest as refusal:
        return refusal
    return None


def _check_latent(shape: Shape, geometry: Geometry) -> None:
    if len(shape) != 2 + len(geometry.patch) or shape[0] < 1:
        dims = ", ".join(_DIMS[-len(geometry.patch) :])
        raise InvalidRequest(f"the latent has shape {list(shape)}: this model takes [batch, channels, {dims}]")
    if shape[1] != geometry.channels:
        raise InvalidRequest(
            f"the latent has {shape[1]} channels and this model takes {geometry.channels}: "
            "use an empty latent node or a VAE that belongs to this model"
        )
    size = " x ".join(map(str, shape[2:]))
    if any(length < patch for length, patch in zip(shape[2:], geometry.patch, strict=True)):
        patch = " x ".join(map(str, geometry.patch))
        raise InvalidRequest(f"a latent of {size} is smaller than one patch of this model, {patch}")
    _check_positions(size, max(geometry.grid(shape[2:])), geometry.positions)


def _check_positions(size: str, longest: int, positions: int | None) -> None:
    if positions is not None and longest > positions:
        raise InvalidRequest(
            f"a latent of {size} is {longest} patches long on one side, and this model has positions for {positions}"
        )


def _check_batch(shapes: Shapes, batch: int) -> None:
    for name, shape in shapes.items():
        if not shape or shape[0] != batch:
            raise InvalidRequest(
                f"{name} of shape {list(shape)} does not fit a latent batch of {batch}: its first dim has to be {batch}"
            )


def _check_names(shapes: Shapes, required: Sequence[str], optional: Sequence[str]) -> None:
    missing = [name for name in required if name not in shapes]
    if missing:
        raise InvalidRequest(f"a branch lacks {', '.join(missing)}; it needs {', '.join(required)}")
    _refuse_names(shapes.keys() - {*required, *optional}, f"this model takes {', '.join([*required, *optional])}")


def _refuse_names(names: Any, known: str) -> None:
    if names:
        raise InvalidRequest(f"{', '.join(sorted(names))} cannot be used: {known}")


def _check_dtypes(metas: Sequence[TensorMeta]) -> None:
    for meta in metas:
        wanted = next((dtypes for ending, dtypes in _DTYPES.items() if meta.name.endswith(ending)), _FLOATS)
        if meta.dtype not in wanted:
            raise InvalidRequest(f"{meta.name} is {meta.dtype}; it has to be one of {', '.join(wanted)}")
