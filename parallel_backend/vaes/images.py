"""AutoencoderKL (Flux, SD3, PixArt, Z-Image, DiT, and Latte, frame by frame) and its two relatives.

Flux.2's normalises inside. Latte may also have one whose decoder mixes the frames.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from .base import VAE, Done, LatentScale, Scaling, Write, scaled_by_factor, told


class Image(VAE):
    """``AutoencoderKL``; ComfyUI's latent is the raw one."""

    CHANNELS, LEVELS = 4, 1
    """diffusers' defaults."""

    @property
    def scale(self) -> LatentScale:
        levels = self.config.get("block_out_channels")
        spatial = 2 ** ((len(levels) if levels else self.LEVELS) - 1)
        return LatentScale(channels=self.config.get("latent_channels", self.CHANNELS), spatial=spatial, video=False)

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_factor(self.config, 0.18215)

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        super().decode(module, latent, lambda pixels: write(pixels.unsqueeze(2)), done)


class TemporalDecoder(Image):
    """``AutoencoderKLTemporalDecoder``: encodes frames one by one, and decodes all of them together.

    So does diffusers' LattePipeline; ComfyUI's latent is the raw one.
    """

    @property
    def scale(self) -> LatentScale:
        return super().scale.as_video()

    def encode_parts(self, module: Any, frames: int) -> int:
        return frames * super().encode_parts(module, frames)

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        frames = latent[0].movedim(1, 0)
        with told(module.decoder, done):
            pixels = module.decode(frames, num_frames=len(frames), return_dict=False)[0]
        write(pixels.movedim(0, 1).unsqueeze(0))

    def encode(self, module: Any, pixels: Tensor, done: Done) -> Tensor:
        picture = super().encode
        return torch.stack([picture(module, frame, done) for frame in pixels.unbind(2)], dim=2)


class Flux2(Image):
    """``AutoencoderKLFlux2``; ComfyUI's latent has patches of pixels as channels, normalised by the batch norm."""

    CHANNELS, LEVELS = 32, 4

    @property
    def scale(self) -> LatentScale:
        inner = super().scale
        return LatentScale(channels=inner.channels * self.patch**2, spatial=inner.spatial * self.patch, video=False)

    @property
    def scaling(self) -> Scaling | None:
        return None

    @property
    def patch(self) -> int:
        """Height and width of a patch."""
        return int(self.config.get("patch_size", (2, 2))[0])

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        mean, std = _statistics(module)
        super().decode(module, pixel_shuffle(latent * std + mean, self.patch), write, done)

    def encode(self, module: Any, pixels: Tensor, done: Done) -> Tensor:
        mean, std = _statistics(module)
        return (pixel_unshuffle(super().encode(module, pixels, done), self.patch) - mean) / std


def _statistics(module: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation ``[1, C, 1, 1]``, as Flux2Pipeline takes them."""
    mean, variance = (values.view(1, -1, 1, 1) for values in (module.bn.running_mean, module.bn.running_var))
    return mean, torch.sqrt(variance + module.config.batch_norm_eps)
