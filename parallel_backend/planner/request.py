"""``Prompt``: a model, a size and the numbers of a sampling, as what the ranks would plan."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE
from ..checkpoint.opening import open_checkpoint
from ..denoiser.plan import DenoisingPlan
from ..errors import InvalidRequest
from ..families.modules import module_class_of
from ..families.registry import family_of
from ..interfaces.family import Family
from ..interfaces.geometry import LATENT, TIMESTEP, Extent, Shapes
from ..interfaces.input_shapes import input_shapes
from ..layout.parallel_layout import ParallelLayout
from ..loading.offload_plan import PartSizes
from ..loading.transformer_part import whole_sizes
from .layers import Layers
from .models import Model

MOST = 1 << 16
"""Largest width, height or number of frames, steps or samples."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is to be made.

    Attributes:
        model: of it.
        size: of the latent after the channels.
        steps: denoiser calls of the sampling.
        guided: whether there is a negative prompt, so that there are two branches.
        samples: pictures or videos that are made at once.
        dtype: of weights and activations.
        compiled: whether blocks are compiled.
        loop: whether the ranks run the step loop. Else ComfyUI runs it, and gets every prediction.
    """

    model: Model
    size: tuple[int, ...]
    steps: int = 20
    guided: bool = False
    samples: int = 1
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    loop: bool = True

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("batch", self.samples)):
            if not 1 <= value <= MOST:
                raise InvalidRequest(f"--{name} {value}: 1 to {MOST} would work")

    @property
    def family(self) -> type[Family]:
        """The model's family."""
        return family_of(self.model.class_name)

    @property
    def branches(self) -> int:
        """Number of branches that are computed."""
        return 2 if self.guided else 1

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a branch's inputs, of one sample.

        Raises:
            InvalidRequest: no example inputs of the family fit the model and the size.
        """
        config = self.family.complete(_with_class_defaults(self.model))
        refusals = []
        for name, variant in self.family.variants().items():
            if self.model.variant not in ("", name):
                continue
            text = variant.text if variant.fixed_text and self.model.variant == "" else self.model.text
            try:
                shapes = input_shapes(self.family, config, variant.inputs, batch=1, size=self.size, text=text)
                self.family.extent(self.model.config, shapes)
            except InvalidRequest as refusal:
                refusals.append(f"{name}: {refusal}")
                continue
            return shapes
        size = "x".join(map(str, self.size))
        raise InvalidRequest(f"{self.model.name} takes no latent of {size} ({'; '.join(refusals)})")

    @cached_property
    def extent(self) -> Extent:
        """The token counts of a branch."""
        return self.family.extent(self.model.config, self.shapes)

    def plan(self, layout: ParallelLayout) -> DenoisingPlan:
        """Return what the ranks would plan in a layout."""
        count = self.branches
        latents = {name: self.shapes[name][1:] for name in self.family.latents}
        return DenoisingPlan(
            layout=layout, geometry=self.family.describe(self.model.config), samples=(self.samples,) * count,
            latents=(latents,) * count, extents=(self.extent,) * count, alike=("",) * count,
            skipped=(frozenset(),) * count, adapters=((),) * count, guided=self.loop,
        )  # fmt: skip

    @cached_property
    def sizes(self) -> PartSizes:
        """What the whole transformer takes on a device: as its file stores it, if there is one."""
        if self.model.path is None:
            return self.layers(1).sizes
        checkpoint = open_checkpoint(self.model.path)
        names = [name for name in (HIGH_NOISE, LOW_NOISE) if name in checkpoint.components]
        return max((whole_sizes(checkpoint, self.dtype, name) for name in names), key=lambda each: each.whole)

    def layers(self, batch: int) -> Layers:
        """Return the transformer's layers with inputs of so many samples."""
        return self._layers.setdefault(batch, self._made(batch))

    @cached_property
    def _layers(self) -> dict[int, Layers]:
        return {}

    def _made(self, batch: int) -> Layers:
        if batch in self._layers:
            return self._layers[batch]
        shapes = {name: (batch, *shape[1:]) for name, shape in self.shapes.items()}
        return Layers(self.model.class_name, self.model.config, shapes, self.dtype)


def of_plan(
    plan: DenoisingPlan, model: Model, shapes: Shapes, *, steps: int, dtype: torch.dtype, compiled: bool = False
) -> Prompt:
    """Return the prompt of a request that the ranks have checked.

    Args:
        plan: of the request.
        model: of the request.
        shapes: of the inputs of its first branch.
        steps: of the sampling.
        dtype: of weights and activations.
        compiled: whether blocks are compiled.
    """
    size = plan.latents[0][LATENT][1:]
    prompt = Prompt(
        model=model, size=size, steps=steps, guided=plan.branches > 1, samples=plan.samples[0], dtype=dtype,
        compiled=compiled, loop=plan.guided,
    )  # fmt: skip
    given = {name: (1, *shape[1:]) for name, shape in shapes.items()}
    prompt.__dict__["shapes"] = given | {TIMESTEP: given.get(TIMESTEP, (1,))}
    return prompt


def parse_size(text: str) -> tuple[int, int, int]:
    """Parse ``WIDTHxHEIGHT`` or ``WIDTHxHEIGHTxFRAMES``.

    Raises:
        InvalidRequest: it is no size.
    """
    numbers = text.lower().split("x")
    if len(numbers) not in (2, 3) or not all(number.isdecimal() and 1 <= int(number) <= MOST for number in numbers):
        raise InvalidRequest(f"--size {text}: write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, such as 832x480x81")
    width, height, frames = (*map(int, numbers), 1)[:3]
    return width, height, frames


def prompt(
    model: Model, size: str, *, steps: int = 20, guided: bool = False, samples: int = 1,
    dtype: torch.dtype = torch.bfloat16, compiled: bool = False,
) -> Prompt:  # fmt: skip
    """Return a prompt for a size in pixels.

    Raises:
        InvalidRequest: the size is none, or the model does not make it.
    """
    latent = model.latent_size(*parse_size(size))
    made = Prompt(model=model, size=latent, steps=steps, guided=guided, samples=samples, dtype=dtype, compiled=compiled)
    made.extent  # noqa: B018 (refuses now)
    return made


def _with_class_defaults(model: Model) -> Mapping[str, Any]:
    """Complete a config with the defaults of its class, whose numbers shapes of inputs may need."""
    parameters = inspect.signature(module_class_of(model.class_name).__init__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty} | dict(model.config)
