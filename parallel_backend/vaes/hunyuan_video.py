"""HunyuanVideo's VAE, untiled: its attention takes one frame's queries at a time instead of a mask over all pairs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .base import VAE, LatentScale, Scaling, scaled_by_factor


class HunyuanVideo(VAE):
    """``AutoencoderKLHunyuanVideo``."""

    @property
    def scale(self) -> LatentScale:
        return LatentScale(
            channels=self.config.get("latent_channels", 16),
            spatial=self.config.get("spatial_compression_ratio", 8),
            temporal=self.config.get("temporal_compression_ratio", 4),
        )

    @property
    def scaling(self) -> Scaling | None:
        return scaled_by_factor(self.config, 0.476986)

    def prepare(self, module: Any) -> None:
        """Blending tiles changes the picture, and diffusers does so over time unless it is told not to."""
        module.use_framewise_encoding = module.use_framewise_decoding = False
        for half in (module.encoder, module.decoder):
            _attend_by_frame(half.mid_block)


def _attend_by_frame(block: Any) -> None:
    """Replace a mid block's ``forward``, which would make a mask of ``(T H W) ** 2`` numbers."""

    def forward(hidden: Tensor) -> Tensor:
        hidden = block.resnets[0](hidden)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            hidden = resnet(hidden if attention is None else _attend(attention, hidden))
        return hidden

    block.forward = forward


def _attend(attention: Any, hidden: Tensor) -> Tensor:
    """Attention ``[B, C, T, H, W]`` in which a frame sees itself and those before it, by diffusers' own layers."""
    tokens = hidden.permute(0, 2, 3, 4, 1).flatten(1, 3)
    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    q, k, v = (
        layer(normed).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    size = hidden.shape[3] * hidden.shape[4]
    frames = [
        scaled_dot_product_attention(queries, k[:, :, : (i + 1) * size], v[:, :, : (i + 1) * size])
        for i, queries in enumerate(q.split(size, dim=2))
    ]
    out = attention.to_out[0](torch.cat(frames, dim=2).transpose(1, 2).flatten(2))
    mixed = (out + tokens) / attention.rescale_output_factor
    back: Tensor = mixed.unflatten(1, hidden.shape[2:]).permute(0, 4, 1, 2, 3)
    return back
