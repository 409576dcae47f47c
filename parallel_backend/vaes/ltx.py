"""LTX-Video's VAE. ComfyUI's latent is normalised, and newer versions decode with a little noise and a timestep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .base import VAE, Done, LatentScale, Scaling, Write, told

TIMESTEP, NOISE = 0.05, 0.025
"""With which ComfyUI decodes."""


class LTXVideo(VAE):
    """``AutoencoderKLLTXVideo``."""

    smallest = 2

    @property
    def scale(self) -> LatentScale:
        halvings: int = sum(self.config.get("spatio_temporal_scaling", (True, True, True, False)))
        patch, patch_t = self.config.get("patch_size", 4), self.config.get("patch_size_t", 1)
        return LatentScale(
            channels=self.config.get("latent_channels", 128),
            spatial=self.config.get("spatial_compression_ratio") or patch * 2**halvings,
            temporal=self.config.get("temporal_compression_ratio") or patch_t * 2**halvings,
        )

    @property
    def scaling(self) -> Scaling | None:
        return None

    def prepare(self, module: Any) -> None:
        """ComfyUI's decoder continues a picture by its mirror image, diffusers' by zeros."""
        for layer in module.decoder.modules():
            if isinstance(layer, nn.Conv3d):
                layer.padding_mode = "reflect"

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        """ComfyUI draws the noise from wherever its generator stands; here it is the same for every sample."""
        mean, std = _statistics(module)
        with _seeded(latent.device):
            if not module.config.timestep_conditioning:
                return super().decode(module, latent * std + mean, write, done)
            noisy = torch.randn_like(latent) * NOISE + (1.0 - NOISE) * latent
            timestep = torch.full((1,), TIMESTEP, device=latent.device, dtype=latent.dtype)
            with told(module.decoder, done):
                pixels = module.decode(noisy * std + mean, timestep, return_dict=False)[0]
        write(pixels)

    def encode(self, module: Any, pixels: Tensor, done: Done) -> Tensor:
        mean, std = _statistics(module)
        return (super().encode(module, pixels, done) - mean) / std


def _statistics(module: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation ``[1, C, 1, 1, 1]``, as LTXPipeline takes them."""
    mean, std = (values.view(1, -1, 1, 1, 1) for values in (module.latents_mean, module.latents_std))
    return mean, std / module.config.scaling_factor


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Layers too draw noise, from torch's own generators, which are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
