"""Frames that are given to Open-Sora 1.2 at the start and the end of a video."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Given frames.

    Attributes:
        latent: ``[1, C, t, H, W]``.
        edit: which part of the sampling's times changes them: 0 keeps them, 1 ignores them.
    """

    latent: Tensor
    edit: float


def placed(start: Clip | None, end: Clip | None, size: Sequence[int], channels: int) -> tuple[Tensor, Tensor]:
    """Return the latent ``[1, C, T, H, W]`` with clips at its ends, and its mask ``[1, 1, T, 1, 1]``.

    The mask is 1 where nothing is given, and a clip's ``edit`` where it is.

    Args:
        size: of the latent: frames, rows, columns.
        channels: of the latent.

    Raises:
        InvalidRequest: the clips do not leave a latent frame to make.
    """
    given = sum(clip.latent.shape[2] for clip in (start, end) if clip)
    if given and given >= size[0] and all(clip.edit == 0.0 for clip in (start, end) if clip):
        raise InvalidRequest(
            f"the given frames take {given} latent frames, and the video has {size[0]}: make a longer video, give "
            "fewer frames, or let them be edited"
        )
    if given > size[0]:
        raise InvalidRequest(f"the given frames take {given} latent frames, and the video has only {size[0]}")
    latent, mask = torch.zeros(1, channels, *size), torch.ones(1, 1, size[0], 1, 1)
    if start:
        frames = slice(0, start.latent.shape[2])
        latent[:, :, frames], mask[:, :, frames] = start.latent.to(latent), start.edit
    if end:
        frames = slice(size[0] - end.latent.shape[2], size[0])
        latent[:, :, frames], mask[:, :, frames] = end.latent.to(latent), end.edit
    return latent, mask
