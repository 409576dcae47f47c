"""What several families share about latents and patches."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import LATENT, Geometry, Shapes


def pad_to_patch(latent: Tensor, patch: Sequence[int]) -> Tensor:
    """Pad ``[B, C, ...]`` circularly at the end, as ComfyUI's ``comfy.ldm.common_dit.pad_to_patch_size``."""
    missing = [-length % step for length, step in zip(latent.shape[2:], patch, strict=True)]
    if not any(missing):
        return latent
    return F.pad(latent, [side for length in reversed(missing) for side in (0, length)], mode="circular")


def fold(latent: Tensor, patch: Sequence[int]) -> Tensor:
    """``[B, C, ...]`` to tokens ``[B, S, C * patch]``, channels before the place in the patch."""
    padded, n = pad_to_patch(latent, patch), len(patch)
    shape = [dim for length, step in zip(padded.shape[2:], patch, strict=True) for dim in (length // step, step)]
    split = padded.reshape(*padded.shape[:2], *shape)
    order = [0, *range(2, 2 + 2 * n, 2), 1, *range(3, 2 + 2 * n, 2)]
    return split.permute(order).flatten(n + 1).flatten(1, n)


def unfold(tokens: Tensor, size: Sequence[int], geometry: Geometry, *, channels_last: bool) -> Tensor:
    """Predicted tokens ``[B, S, values]`` to ``[B, C, ...]`` of ``size``; what was padded is cropped.

    ``channels_last`` says whether the values of a token are patch by channels, or channels by patch.
    """
    grid, patch, n = geometry.grid(size), geometry.patch, len(size)
    inside = (*patch, geometry.out_channels) if channels_last else (geometry.out_channels, *patch)
    folded = tokens.reshape(tokens.shape[0], *grid, *inside)
    channel = 2 * n + 1 if channels_last else n + 1
    first = n + 1 if channels_last else n + 2
    order = [0, channel]
    for i in range(n):
        order += [1 + i, first + i]
    whole = folded.permute(order)
    for i in range(n):
        whole = whole.flatten(2 + i, 3 + i)
    return crop(whole, size).contiguous()


def crop(padded: Tensor, size: Sequence[int]) -> Tensor:
    """Leave out of ``[B, C, ...]`` what was padded."""
    for dim, length in enumerate(size, start=2):
        padded = padded.narrow(dim, 0, length)
    return padded


def check_text(shape: tuple[int, ...], width: int, name: str = "conditioning") -> int:
    """The number of text tokens of ``[batch, tokens, width]``.

    Raises:
        InvalidRequest: the shape is another.
    """
    if len(shape) != 3 or shape[1] < 1 or shape[2] != width:
        raise InvalidRequest(
            f"{name} of shape {list(shape)} does not fit this model, whose text encoder gives [batch, tokens, {width}]"
        )
    return shape[1]


def check_vector(name: str, shape: tuple[int, ...], width: int) -> None:
    """Refuse what is not ``[batch, width]``.

    Raises:
        InvalidRequest: the shape is another.
    """
    if len(shape) != 2 or shape[1] != width:
        raise InvalidRequest(f"{name} of shape {list(shape)} does not fit this model, which takes [batch, {width}]")


def check_mask(name: str, shapes: Shapes, tokens: int) -> None:
    """Refuse a mask, if there is one, that is not ``[batch, tokens]``.

    Raises:
        InvalidRequest: the shape is another.
    """
    shape = shapes.get(name)
    if shape is not None and shape[1:] != (tokens,):
        raise InvalidRequest(
            f"{name} of shape {list(shape)} does not fit the text of {tokens} tokens, [batch, {tokens}]"
        )


def check_concat(channels: int, shapes: Shapes, node: str) -> None:
    """Refuse another ``concat`` than ``[batch, channels, ...]`` of the latent's size, or any where there are none.

    ``node`` is the one of ComfyUI that gives it.

    Raises:
        InvalidRequest: it is another.
    """
    shape, wanted = shapes.get("concat"), (channels, *shapes[LATENT][2:])
    if channels and (shape is None or shape[1:] != wanted):
        raise InvalidRequest(
            f"this model needs an image's latent beside the noise, [batch, {', '.join(map(str, wanted))}], and got "
            f"{'none' if shape is None else list(shape)}: connect {node}"
        )
    if not channels and shape is not None:
        raise InvalidRequest(f"concat of shape {list(shape)} cannot be used: this model takes noise alone")


def check_reference(shapes: Shapes, width: int, axes: int) -> int:
    """The number of tokens of reference images, whose places have so many axes; 0 without any.

    Raises:
        InvalidRequest: they do not fit the model or one another.
    """
    tokens, ids = shapes.get("reference"), shapes.get("reference_ids")
    if tokens is None and ids is None:
        return 0
    if tokens is None or ids is None or tokens[2:] != (width,) or ids[1:] != (tokens[1], axes):
        raise InvalidRequest(
            f"reference of shape {None if tokens is None else list(tokens)} with reference_ids of shape "
            f"{None if ids is None else list(ids)}: this model takes [batch, tokens, {width}] with "
            f"[batch, tokens, {axes}]; ReferenceLatent gives them"
        )
    return tokens[1]
