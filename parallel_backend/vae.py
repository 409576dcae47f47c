"""Decode and encode on rank 0, untiled, sample by sample with progress. What a VAE class is like is in ``vaes``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidRequest
from .vaes import VAE
from .wire import TensorMeta

Tick = Callable[[int, int], None]
"""Called with the number of parts done and the total; may raise to end the work."""


def check(metas: tuple[TensorMeta, ...], kind: VAE, *, name: str) -> None:
    """Check a ``Decode`` (``name="latent"``) or an ``Encode`` (``name="pixels"``) by its header.

    Raises:
        InvalidRequest: names the shape and what would work.
    """
    scale, dims = kind.scale, (5,) if kind.scale.video else (4, 5)
    if [meta.name for meta in metas] != [name] or len(metas[0].shape) not in dims or 0 in metas[0].shape:
        counts = " or ".join(map(str, dims))
        raise InvalidRequest(f"the VAE takes one tensor {name} of {counts} dims, none of them empty")
    shape = metas[0].shape
    if name == "latent" and shape[1] != scale.channels:
        raise InvalidRequest(f"the latent has {shape[1]} channels and this VAE takes {scale.channels}")
    if name == "latent" and min(shape[-2:]) < kind.smallest:
        raise InvalidRequest(
            f"a latent of {list(shape[-2:])} is too small for this VAE: height and width need {kind.smallest} or more"
        )
    if name == "pixels" and (shape[-1] != 3 or any(size % scale.spatial for size in shape[-3:-1])):
        raise InvalidRequest(
            f"pixels of shape {list(shape)}: this VAE takes [batch, frames, height, width, 3], pictures without "
            f"frames, with a height and a width that are multiples of {scale.spatial}"
        )


def decode(kind: VAE, module: Any, latent: Tensor, tick: Tick) -> Tensor:
    """Latents ``[B, C, T, H, W]`` to pixels ``[B, T', H', W', 3]``, float32 in 0..1 on the CPU.

    ``[B, C, H, W]`` gives ``[B, H', W', 3]``; the VAE of pictures takes the frames of a video one by one.
    Each part goes straight to its place in the result.
    """
    single = latent.ndim == 5 and not kind.scale.video
    samples = latent.transpose(1, 2).flatten(0, 1) if single else latent
    writer = _Writer(kind, module, samples, tick)
    for sample in samples:
        kind.decode(module, sample[None].to(module.dtype), writer.write)
    pixels = writer.all()
    pixels = pixels if samples.ndim == 5 else pixels[:, 0]
    return pixels.unflatten(0, (latent.shape[0], -1)) if single else pixels


def encode(kind: VAE, module: Any, pixels: Tensor, tick: Tick) -> Tensor:
    """Pixels ``[B, T, H, W, 3]`` or ``[B, H, W, 3]`` in 0..1 to latents ``[B, C, T', H', W']`` or ``[B, C, H', W']``.

    They are the posterior's mode, in float32. ``T' = 1 + (T - 1) // temporal``; as in ComfyUI, frames beyond the last
    whole group make no latent. The VAE of pictures takes the frames of a video one by one.
    """
    single = pixels.ndim == 5 and not kind.scale.video
    samples = pixels.flatten(0, 1) if single else pixels
    frames = kind.kept_frames(samples.shape[1]) if samples.ndim == 5 else 1
    samples = samples[:, :frames] if samples.ndim == 5 else samples
    total = len(samples) * kind.encode_parts(module, frames)
    parts = iter(range(1, total + 1))
    latents = [
        kind.encode(module, sample[None].to(module.dtype).movedim(-1, 1) * 2.0 - 1.0, lambda: tick(next(parts), total))
        for sample in samples
    ]
    latent = torch.cat(latents).float()
    return latent.unflatten(0, (pixels.shape[0], -1)).transpose(1, 2) if single else latent


class _Writer:
    """Puts the decoded parts of ``[N, C, T, H, W]`` or ``[N, C, H, W]``, in order, into ``[N, T', H', W', 3]``."""

    def __init__(self, kind: VAE, module: Any, samples: Tensor, tick: Tick) -> None:
        frames = samples.shape[2] if samples.ndim == 5 else 1
        height, width = (size * kind.scale.spatial for size in samples.shape[-2:])
        self._pixels = torch.empty(len(samples), kind.pixel_frames(frames), height, width, 3)
        self._parts, self._tick = len(samples) * kind.decode_parts(module, frames), tick
        self._frames = self._done = 0

    def write(self, part: Tensor) -> None:
        """Take the next frames ``[1, 3, t, H', W']`` in -1..1."""
        places = self._pixels.flatten(0, 1)
        frames = part[0].movedim(0, -1)
        if self._frames + len(frames) > len(places) or frames.shape[1:] != places.shape[1:]:
            raise InvalidRequest(
                f"the VAE gives pixels of shape {list(frames.shape)} where its config.json promises "
                f"{list(places[self._frames :].shape)}: the two do not belong together"
            )
        for place, frame in zip(places[self._frames :], frames, strict=False):
            place.copy_(((frame.float() + 1.0) / 2.0).clamp_(0.0, 1.0))
        self._frames += len(frames)
        self._done += 1
        self._tick(self._done, self._parts)

    def all(self) -> Tensor:
        """The whole result.

        Raises:
            InvalidRequest: there were fewer frames than the VAE's config promises.
        """
        samples, frames = self._pixels.shape[:2]
        if self._frames < samples * frames:
            raise InvalidRequest(
                f"the VAE gave {self._frames} frames where its config.json promises {samples * frames}"
            )
        return self._pixels
