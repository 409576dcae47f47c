"""The VAE of LTX-Video, LTX-2 and 2.3. ComfyUI's latent is normalised.

Some versions decode with a timestep and a little noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from .base import VAE, LatentScale, Scaling, UnitDone, WriteFrames, report_convolutions

TIMESTEP, NOISE = 0.05, 0.025
"""The timestep and the share of noise that ComfyUI decodes with, if a file's metadata does not say others."""


class LTXVideo(VAE):
    """``AutoencoderKLLTXVideo``."""

    own_module: ClassVar[str] = "ltx_module"
    min_latent_size = 2

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
        """Pad as ComfyUI does, where diffusers pads with zeros.

        That is as a file's metadata says, otherwise with zeros in the encoder and by reflection in the decoder.
        """
        for half, default in ((module.encoder, "zeros"), (module.decoder, "reflect")):
            for layer in half.modules():
                if isinstance(layer, nn.Conv3d):
                    layer.padding_mode = self.config.get("_spatial_padding_mode", default)

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        """Decode one latent. Every sample gets the same noise; ComfyUI's depends on its generator's current state."""
        mean, std = _statistics(module)
        with _seeded(latent.device):
            if not module.config.timestep_conditioning:
                return super().decode(module, latent * std + mean, write, unit_done)
            noise: float = self.config.get("_decode_noise_scale", NOISE)
            noisy = torch.randn_like(latent) * noise + (1.0 - noise) * latent
            value = self.config.get("_decode_timestep", TIMESTEP)
            timestep = torch.full((1,), value, device=latent.device, dtype=latent.dtype)
            with report_convolutions(module.decoder, unit_done):
                pixels = module.decode(noisy * std + mean, timestep, return_dict=False)[0]
        write(pixels)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        mean, std = _statistics(module)
        return (super().encode(module, pixels, unit_done) - mean) / std


def _statistics(module: Any) -> tuple[Tensor, Tensor]:
    """Return the latent's mean and standard deviation, ``[1, C, 1, 1, 1]``, as in diffusers' LTXPipeline."""
    mean, std = (rearrange(values, "c -> 1 c 1 1 1") for values in (module.latents_mean, module.latents_std))
    return mean, std / module.config.scaling_factor


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, from which layers draw noise too, and restore their state on exit."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
