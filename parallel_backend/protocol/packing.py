"""Several latents as one flat tensor ``[B, 1, values]``, as ComfyUI hands them to its samplers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


def pack(latents: Sequence[Tensor]) -> Tensor:
    """Join latents ``[B, ...]``; a single one stays as it is."""
    return latents[0] if len(latents) == 1 else torch.cat([latent.flatten(1) for latent in latents], dim=1)[:, None]


def unpack(packed: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Split what ``pack`` returns into views ``[B, *shape]``."""
    if len(shapes) == 1:
        return [packed]
    parts = packed.flatten(1).split([math.prod(shape) for shape in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def packed_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of packed latents without the batch."""
    return shapes[0] if len(shapes) == 1 else (1, sum(map(math.prod, shapes)))
