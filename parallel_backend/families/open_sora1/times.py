"""The times of Open-Sora 1.2: how they are spread by the size of a video, and from when on a frame is generated."""

import math

import torch
from torch import Tensor

STEPS = 1000.0
"""The timestep of pure noise."""

_SQUARE = 512
_CHUNK, _LATENTS, _GROUP = 17, 5, 4


def shift(height: int, width: int, frames: int) -> float:
    """Return the shift of times, as ComfyUI's *ModelSamplingSD3* takes it.

    The authors' code counts 5 latent frames for every 17 whole ones, which gives no number for 2 to 16 frames. For
    those this counts the latent frames.

    Args:
        height: in pixels.
        width: in pixels.
        frames: of the video, not of its latent.
    """
    latents = frames // _CHUNK * _LATENTS if frames >= _CHUNK else -(-frames // _GROUP)
    return math.sqrt(height * width / _SQUARE**2) * math.sqrt(latents)


def latent_frames(frames: int) -> int:
    """Return how many latent frames a video of ``frames`` frames has: 5 for each 17, and 1 for up to 4 of the rest."""
    chunks, rest = divmod(frames, _CHUNK)
    return chunks * _LATENTS - (-rest // _GROUP)


def generated(values: Tensor, timestep: Tensor) -> Tensor:
    """Return which frames are generated at a timestep, bool ``[B, T]``; the others are given.

    Args:
        values: ``[B, T]``: 1 for a frame that is generated, 0 for a given one. A frame between, which is edited, is
            generated from this part of the times on.
        timestep: ``[B]`` in 0..1000. One that rounding has lifted above 1000 counts as 1000.
    """
    return values >= (timestep / STEPS).clamp(max=1.0)[:, None]


def add_noise(latent: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """Return a latent ``[B, ...]`` with as much noise as belongs to timesteps ``[B]``."""
    part = (timestep / STEPS).reshape(-1, *[1] * (latent.ndim - 1))
    return torch.lerp(latent, noise.to(latent), part.to(latent))
