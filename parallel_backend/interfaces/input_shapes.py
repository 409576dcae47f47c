"""Shapes of the inputs of a forward, from what a family's variant says of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest
from .family import Family, Inputs
from .geometry import LATENT, TIMESTEP


def input_shapes(
    family: type[Family], config: Mapping[str, Any], model_inputs: Inputs, *, batch: int, size: Sequence[int], text: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs of a forward.

    Args:
        family: the model's family.
        config: the model's config.
        model_inputs: inputs beside latent and timestep, as in ``Variant.inputs``.
        batch: samples.
        size: of the latent.
        text: text tokens.

    Raises:
        InvalidRequest: the config lacks a number, or the family refuses it.
    """
    geometry = family.describe(config)
    # A latent with a wrong number of dims is refused later, like any request's.
    tokens = math.prod(geometry.grid(size)) if len(size) == len(geometry.patch) else math.prod(size)
    numbers = {**config, "frames": size[0], "tokens": tokens, "text": text}
    shapes = {LATENT: (batch, geometry.channels, *size), TIMESTEP: (batch,)}
    return shapes | {name: (batch, *_resolve(name, shape, size, numbers)) for name, shape in model_inputs.items()}


def _resolve(name: str, shape: Sequence[int | str], size: Sequence[int], numbers: Mapping[str, Any]) -> list[int]:
    resolved: list[int] = []
    for dim in shape:
        if dim == "size":
            resolved += size
            continue
        number = numbers.get(dim) if isinstance(dim, str) else dim
        if number is None:
            raise InvalidRequest(f"{name} needs {dim}, which the model's config lacks")
        resolved.append(int(number))
    return resolved
