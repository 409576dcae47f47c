"""AutoencoderKL, the VAE of Flux.1, SD3, PixArt, Z-Image, DiT and (frame by frame) Latte, and its two relatives.

AutoencoderKLFlux2 normalises its latents itself. AutoencoderKLTemporalDecoder, which Latte may have instead, decodes
all frames of a video together.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from .base import VAE, LatentScale, Scaling, UnitDone, WriteFrames, report_convolutions, scaled_by_factor


class Image(VAE):
    """``AutoencoderKL``. ComfyUI's latent is the raw latent."""

    CHANNELS, LEVELS = 4, 1
    """diffusers' defaults: latent channels and resolution levels."""

    @property
    def scale(self) -> LatentScale:
        levels = self.config.get("block_out_channels")
        spatial = 2 ** ((len(levels) if levels else self.LEVELS) - 1)
        return LatentScale(channels=self.config.get("latent_channels", self.CHANNELS), spatial=spatial, video=False)

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_factor(self.config, 0.18215)

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        super().decode(module, latent, lambda pixels: write(pixels.unsqueeze(2)), unit_done)


class TemporalDecoder(Image):
    """``AutoencoderKLTemporalDecoder``. It encodes frames one by one and decodes all of them together.

    diffusers' LattePipeline decodes them like this. ComfyUI's latent is the raw latent.
    """

    @property
    def scale(self) -> LatentScale:
        return super().scale.as_video()

    def encode_progress_units(self, module: Any, frames: int) -> int:
        return frames * super().encode_progress_units(module, frames)

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        frames = rearrange(latent, "1 c t h w -> t c h w")
        with report_convolutions(module.decoder, unit_done):
            pixels = module.decode(frames, num_frames=len(frames), return_dict=False)[0]
        write(rearrange(pixels, "t c h w -> 1 c t h w"))

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        encode_frame = super().encode
        return torch.stack([encode_frame(module, frame, unit_done) for frame in pixels.unbind(2)], dim=2)


class Flux2(Image):
    """``AutoencoderKLFlux2``. ComfyUI's latent has patches as channels, normalised by the batch norm's statistics."""

    CHANNELS, LEVELS = 32, 4

    @property
    def scale(self) -> LatentScale:
        raw = super().scale
        return LatentScale(channels=raw.channels * self.patch**2, spatial=raw.spatial * self.patch, video=False)

    @property
    def scaling(self) -> Scaling | None:
        return None

    @property
    def patch(self) -> int:
        """Height and width of a patch of the raw latent."""
        return int(self.config.get("patch_size", (2, 2))[0])

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        mean, std = _statistics(module)
        patches = "b (c row column) h w -> b c (h row) (w column)"
        raw = rearrange(latent * std + mean, patches, row=self.patch, column=self.patch)
        super().decode(module, raw, write, unit_done)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        mean, std = _statistics(module)
        raw = super().encode(module, pixels, unit_done)
        patches = "b c (h row) (w column) -> b (c row column) h w"
        return (rearrange(raw, patches, row=self.patch, column=self.patch) - mean) / std


def _statistics(module: Any) -> tuple[Tensor, Tensor]:
    """Return the latent's mean and standard deviation, ``[1, C, 1, 1]``, as in diffusers' Flux2Pipeline."""
    mean, variance = (rearrange(values, "c -> 1 c 1 1") for values in (module.bn.running_mean, module.bn.running_var))
    return mean, torch.sqrt(variance + module.config.batch_norm_eps)
