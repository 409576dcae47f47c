"""Mochi's VAE, which decodes and encodes a whole video at once."""

from math import prod
from typing import Any

import torch

from .base import VAE, LatentScale, Scaling, scaled_by_channel

# Published with Mochi 1; also the defaults of diffusers' class.
MEAN = (
    -0.06730895953510081, -0.038011381506090416, -0.07477820912866141, -0.05565264470995561,
    0.012767231469026969, -0.04703542746246419, 0.043896967884726704, -0.09346305707025976,
    -0.09918314763016893, -0.008729793427399178, -0.011931556316503654, -0.0321993391887285,
)  # fmt: skip
STD = (
    0.9263795028493863, 0.9248894543193766, 0.9393059390890617, 0.959253732819592,
    0.8244560132752793, 0.917259975397747, 0.9294154431013696, 1.3720942357788521,
    0.881393668867029, 0.9168315692124348, 0.9185249279345552, 0.9274757570805041,
)  # fmt: skip


class Mochi(VAE):
    """``AutoencoderKLMochi``."""

    working_dtypes = (torch.float16,)

    @property
    def scale(self) -> LatentScale:
        return LatentScale(
            channels=self.config.get("latent_channels", 12),
            spatial=prod(self.config.get("spatial_expansions", (2, 2, 2))),
            temporal=prod(self.config.get("temporal_expansions", (1, 2, 3))),
        )

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_channel(self.config, MEAN, STD)

    def prepare(self, module: Any) -> None:
        """Compute as ComfyUI does where diffusers differs.

        Each upsampling block of the decoder drops its surplus leading frames at once. diffusers drops them at the end,
        so until then they influence the frames after them. The encoder's attention is not causal: a frame also sees
        later frames.
        """
        module.drop_last_temporal_frames = False
        for block in module.decoder.up_blocks:
            block.register_forward_hook(_drop_leading_frames)
        for layer in module.encoder.modules():
            if isinstance(getattr(layer, "is_causal", None), bool):
                layer.is_causal = False

    def encoded_frames(self, frames: int) -> int:
        """Return ``frames``: attention reads the last frames even if they yield no latent frame."""
        return frames


def _drop_leading_frames(block: Any, _inputs: object, output: tuple[Any, Any]) -> tuple[Any, Any]:
    frames, cache = output
    return frames[:, :, block.temporal_expansion - 1 :], cache
