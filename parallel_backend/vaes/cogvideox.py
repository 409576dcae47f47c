"""CogVideoX's VAE. It decodes 2 latent frames or encodes 8 frames at a time; a remainder joins the first chunk."""

from typing import Any

import torch

from .base import Framewise, LatentScale, Scaling, scaled_by_factor


class CogVideoX(Framewise):
    """``AutoencoderKLCogVideoX``. Latents are ``[B, C, T, H, W]``; diffusers' pipeline puts T before C."""

    working_dtypes = (torch.bfloat16, torch.float16)

    @property
    def scale(self) -> LatentScale:
        return LatentScale(
            channels=self.config.get("latent_channels", 16),
            spatial=2 ** (len(self.config.get("block_out_channels", range(4))) - 1),
            temporal=int(self.config.get("temporal_compression_ratio", 4)),
        )

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_factor(self.config, 1.15258426)

    def pixel_frames(self, frames: int) -> int:
        """Return how many pixel frames ``frames`` latent frames decode to.

        If the number is odd, the first frame gives one pixel frame; if it is even, every frame gives ``temporal``.
        """
        return super().pixel_frames(frames) if frames % 2 else self.scale.temporal * frames

    def decode_progress_units(self, module: Any, frames: int) -> int:
        return max(frames // int(module.num_latent_frames_batch_size), 1)

    def encode_progress_units(self, module: Any, frames: int) -> int:
        return max(frames // int(module.num_sample_frames_batch_size), 1)
