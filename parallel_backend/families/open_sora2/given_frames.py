"""Frames that are given to Open-Sora 2.0 beside the noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class GivenFrames:
    """Latents of given frames in a video.

    Attributes:
        given: ``[1, 1, T, H, W]``, 1 in given latent frames and 0 in others.
        latent: ``[1, C, T, H, W]``, the given latent frames and zeros.
    """

    given: Tensor
    latent: Tensor


def given_frames(start: Tensor | None, end: Tensor | None, size: Sequence[int], channels: int) -> GivenFrames:
    """Place the latents ``[1, C, t, H, W]`` of given frames at the start and the end of a video.

    Args:
        size: of the video's latent: frames, rows, columns.
        channels: of the latent.

    Raises:
        InvalidRequest: they do not leave a latent frame to make.
    """
    clips = [clip for clip in (start, end) if clip is not None]
    frames = sum(clip.shape[2] for clip in clips)
    if frames >= size[0]:
        raise InvalidRequest(
            f"the given frames take {frames} latent frames, and the video has {size[0]}: make a longer video, or give "
            "fewer frames"
        )
    latent, given = torch.zeros(1, channels, *size), torch.zeros(1, 1, *size)
    if start is not None:
        latent[:, :, : start.shape[2]], given[:, :, : start.shape[2]] = start.to(latent), 1.0
    if end is not None:
        latent[:, :, -end.shape[2] :], given[:, :, -end.shape[2] :] = end.to(latent), 1.0
    return GivenFrames(given=given, latent=latent)


def are_images(given: Tensor) -> bool:
    """Whether the frames that a mask ``[B, 1, T, H, W]`` gives are images at the start or the end, and no clips."""
    marked = given[0, 0].amax(dim=(1, 2)) > 0
    return bool(marked.any()) and not bool(marked[1:-1].any())


def check_size(frames: GivenFrames, size: Sequence[int]) -> None:
    """Refuse given frames that are for a latent of another size, ``(frames, rows, columns)``.

    Raises:
        InvalidRequest: names both sizes.
    """
    ours, theirs = ("x".join(map(str, each)) for each in (frames.given.shape[2:], size))
    if ours != theirs:
        raise InvalidRequest(
            f"the given frames are for a latent of {ours}, and the sampler's is {theirs}: sample the latent of the "
            "node that gives the frames"
        )


def put_back(samples: Tensor, frames: GivenFrames) -> Tensor:
    """Return samples ``[B, C, T, H, W]`` with the given frames as they were given."""
    given = frames.given.to(samples)
    return samples * (1 - given) + frames.latent.to(samples) * given
