"""Latents to tokens and back, and checks of the shapes of inputs that several families take."""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import LATENT, Geometry, Shapes

_LATENT = {2: "b c (h ph) (w pw)", 3: "b c (t pt) (h ph) (w pw)"}
"""einops pattern of a latent, by its number of dims after the channels. ``ph`` is the height of a patch."""

_TOKENS = {2: "b (h w)", 3: "b (t h w)"}
"""einops pattern of the latent's tokens, without the values of a token."""


def pad_to_patch(latent: Tensor, patch: Sequence[int]) -> Tensor:
    """Pad ``[B, C, ...]`` circularly at the end, as ComfyUI's ``comfy.ldm.common_dit.pad_to_patch_size`` does."""
    missing = [-length % step for length, step in zip(latent.shape[2:], patch, strict=True)]
    if not any(missing):
        return latent
    return F.pad(latent, [side for length in reversed(missing) for side in (0, length)], mode="circular")


def to_tokens(latent: Tensor, patch: Sequence[int], values: str) -> Tensor:
    """Turn a latent ``[B, C, ...]`` into tokens ``[B, S, values]``, one per patch, after padding it to whole patches.

    ``values`` is the order of the values in a token, as an einops pattern of ``c``, ``pt``, ``ph`` and ``pw``.
    """
    n = len(patch)
    return rearrange(pad_to_patch(latent, patch), f"{_LATENT[n]} -> {_TOKENS[n]} ({values})", **_patch_sizes(patch))


def to_latent(tokens: Tensor, size: Sequence[int], geometry: Geometry, values: str) -> Tensor:
    """Turn predicted tokens ``[B, S, values]`` into ``[B, C, *size]``, cropping the padding.

    ``values`` is the order of the values in a token, as an einops pattern of ``c``, ``pt``, ``ph`` and ``pw``.
    """
    n = len(size)
    grid = dict(zip("thw"[-n:], geometry.grid(size), strict=True))
    padded = rearrange(tokens, f"{_TOKENS[n]} ({values}) -> {_LATENT[n]}", **grid, **_patch_sizes(geometry.patch))
    return crop(padded, size).contiguous()


def crop(padded: Tensor, size: Sequence[int]) -> Tensor:
    """Crop ``[B, C, ...]`` to ``[B, C, *size]``."""
    for dim, length in enumerate(size, start=2):
        padded = padded.narrow(dim, 0, length)
    return padded


def check_text(shape: tuple[int, ...], width: int, name: str = "conditioning") -> int:
    """Check that a text's shape is ``[batch, tokens, width]``, and return the number of tokens.

    Raises:
        InvalidRequest: the shape is another.
    """
    if len(shape) != 3 or shape[1] < 1 or shape[2] != width:
        raise InvalidRequest(
            f"{name} of shape {list(shape)} does not fit this model, whose text encoder gives [batch, tokens, {width}]"
        )
    return shape[1]


def second_size(shapes: Shapes, name: str, otherwise: int) -> int:
    """Return how many rows an input that may be left out has for each sample: ``otherwise`` if it has no second dim."""
    shape = shapes.get(name, ())
    return shape[1] if len(shape) > 1 else otherwise


def check_vector(name: str, shape: tuple[int, ...], width: int) -> None:
    """Check that an input's shape is ``[batch, width]``.

    Raises:
        InvalidRequest: the shape is another.
    """
    if len(shape) != 2 or shape[1] != width:
        raise InvalidRequest(f"{name} of shape {list(shape)} does not fit this model, which takes [batch, {width}]")


def check_mask(name: str, shapes: Shapes, tokens: int) -> None:
    """Check that the mask ``name``, if there is one, has the shape ``[batch, tokens]``.

    Raises:
        InvalidRequest: the shape is another.
    """
    shape = shapes.get(name)
    if shape is not None and shape[1:] != (tokens,):
        raise InvalidRequest(
            f"{name} of shape {list(shape)} does not fit the text of {tokens} tokens: [batch, {tokens}] would work"
        )


def check_concat(channels: int, shapes: Shapes, node: str) -> None:
    """Check that ``concat`` is ``[batch, channels, ...]`` of the latent's size, or absent if ``channels`` is 0.

    ``node`` is the ComfyUI node that provides it.

    Raises:
        InvalidRequest: it is missing, has another shape, or the model has no channels for it.
    """
    shape, wanted = shapes.get("concat"), (channels, *shapes[LATENT][2:])
    if channels and (shape is None or shape[1:] != wanted):
        raise InvalidRequest(
            f"this model needs an image's latent beside the noise, [batch, {', '.join(map(str, wanted))}], and got "
            f"{'none' if shape is None else list(shape)}: connect {node}"
        )
    if not channels and shape is not None:
        raise InvalidRequest(
            f"concat of shape {list(shape)} cannot be used: this model takes only noise, so remove the image's latent"
        )


def check_reference(shapes: Shapes, width: int, axes: int) -> int:
    """Return the number of tokens of reference images, 0 without any.

    Args:
        shapes: shapes of a branch's inputs.
        width: values of a token.
        axes: numbers of a position.

    Raises:
        InvalidRequest: tokens and positions do not fit the model, or one another.
    """
    tokens, ids = shapes.get("reference"), shapes.get("reference_ids")
    if tokens is None and ids is None:
        return 0
    if tokens is None or ids is None or tokens[2:] != (width,) or ids[1:] != (tokens[1], axes):
        raise InvalidRequest(
            f"reference of shape {None if tokens is None else list(tokens)} with reference_ids of shape "
            f"{None if ids is None else list(ids)} does not fit this model, which takes [batch, tokens, {width}] with "
            f"[batch, tokens, {axes}]: connect ReferenceLatent, which gives both"
        )
    return tokens[1]


def _patch_sizes(patch: Sequence[int]) -> Mapping[str, int]:
    return dict(zip(("pt", "ph", "pw")[-len(patch) :], patch, strict=True))
