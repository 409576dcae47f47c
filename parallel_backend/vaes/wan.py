"""Wan's VAEs, which process one latent frame at a time.

Wan 2.1 and Qwen-Image share an architecture. Wan 2.2 works on patches of pixels.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from .base import Framewise, LatentScale, Scaling, UnitDone, WriteFrames, scaled_by_channel

CHANNELS, DOWNSAMPLE = 16, (False, True, True)
# Published with Wan 2.1; also the defaults of both of diffusers' classes.
MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip


class Wan(Framewise):
    """``AutoencoderKLWan``."""

    working_dtypes = (torch.bfloat16, torch.float16)

    @property
    def scale(self) -> LatentScale:
        # diffusers spells it this way.
        downsample = self.config.get("temperal_downsample", DOWNSAMPLE)
        return LatentScale(
            channels=self.config.get("z_dim", CHANNELS),
            spatial=2 ** len(downsample) * self.patch,
            temporal=2 ** sum(map(bool, downsample)),
        )

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_channel(self.config, MEAN, STD)

    @property
    def patch(self) -> int:
        """Height and width, in pixels, of the patch that the decoder gives at each of its output positions."""
        return int(self.config.get("patch_size") or 1)

    @property
    def colors(self) -> int:
        return super().colors // self.patch**2

    def decode_progress_units(self, module: Any, frames: int) -> int:
        return frames

    def encode_progress_units(self, module: Any, frames: int) -> int:
        return 1 + (frames - 1) // self.scale.temporal

    def to_pixels(self, chunk: Tensor) -> Tensor:
        """Undo diffusers' ``patchify``, which flattens (colour, column, row) into channels."""
        if self.patch == 1:
            return chunk
        patches = "b (colour column row) t h w -> b colour t (h row) (w column)"
        return rearrange(chunk, patches, column=self.patch, row=self.patch)

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        try:
            super().decode(module, latent, write, unit_done)
        finally:
            module.clear_cache()

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        try:
            return super().encode(module, pixels, unit_done)
        finally:
            module.clear_cache()


class QwenImage(Wan):
    """``AutoencoderKLQwenImage``. An image is a video of one frame."""

    @property
    def colors(self) -> int:
        return int(self.config.get("input_channels", 3))
