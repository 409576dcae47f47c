"""The times of MiniMax-H3's rows: the sound has a schedule of its own, and given or masked rows have other times.

Times are 1 without noise and 0 at the start, as ComfyUI's class computes them from the picture's sigma.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...interfaces.geometry import TIMESTEP

SIGMA_SHIFTS, CONDITIONING_TIMES = "sigma_shifts", "conditioning_times"
MASK_LEVELS, SOUND_MASK_LEVELS = "mask_levels", "sound_mask_levels"
SOUND_SCALE = "sound_scale"

GIVEN_PICTURE, GIVEN_SOUND = 0.999, 1.0
"""The least times of given rows, and the most of masked rows, unless the picture itself is further."""

_SHIFTS = (12.0, 3.0)
"""The published schedules' shifts, of the picture and of the sound."""

_LEAST, _THOUSAND = 1e-6, 1000.0


def sigmas(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sigmas ``[B]`` of picture and sound: both schedules shift the same even steps."""
    picture = (inputs[TIMESTEP].float() / _THOUSAND).clamp(min=_LEAST)
    first, second = inputs[SIGMA_SHIFTS].float().unbind(1) if SIGMA_SHIFTS in inputs else _SHIFTS
    even = picture / (first + picture * (1.0 - first))
    return picture, second * even / (1.0 + (second - 1.0) * even)


def times(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the distinct times of rows ``[B, T]``.

    They are those of the picture, of the sound, of given rows of pictures and of sounds, of the levels of the picture's
    mask, and of those of the sound's. A mask's level m has a row at sigma times m.
    """
    return torch.cat(list(_times(inputs)), dim=1)


def _times(inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    both = [1.0 - sigma[:, None] for sigma in sigmas(inputs)]
    yield from both
    least: tuple[Tensor | float, ...] = (GIVEN_PICTURE, GIVEN_SOUND)
    if CONDITIONING_TIMES in inputs:
        least = inputs[CONDITIONING_TIMES].float()[..., None].unbind(1)
    for time, given in zip(both, least, strict=True):
        yield time.clamp(min=given)
    for time, most, levels in zip(both, (GIVEN_PICTURE, GIVEN_SOUND), (MASK_LEVELS, SOUND_MASK_LEVELS), strict=True):
        if levels in inputs:
            yield (1.0 - inputs[levels].float() * (1.0 - time)).minimum(time.clamp(min=most))


def carried(inputs: Mapping[str, Tensor], sound: Tensor) -> Tensor:
    """Return the sound's own latent ``[B, ...]``.

    A sampler has one schedule, so it carries the sound scaled by both sigmas' ratio where ``sound_scale`` is given.
    """
    if SOUND_SCALE not in inputs:
        return sound
    picture, own = sigmas(inputs)
    return sound * (own / picture).to(sound.dtype).view(-1, *[1] * (sound.ndim - 1))


def followed(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors ``[B]`` of prediction and carried sound that make up what the sampler follows."""
    scale, (picture, own) = inputs[SOUND_SCALE].float(), sigmas(inputs)
    return 1.0 + (scale - 1.0) * own, (1.0 - scale) * own / picture
