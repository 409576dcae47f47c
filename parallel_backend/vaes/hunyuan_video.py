"""HunyuanVideo's VAE, untiled: its attention takes one frame's queries at a time instead of a mask over all pairs."""

from collections.abc import Callable
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
    """Replace a mid block's ``forward``, which would make a mask of ``(T H W) ** 2`` numbers.

    Its ``causal`` is what attends, to be replaced where a rank has some of the rows.
    """

    def forward(hidden: Tensor) -> Tensor:
        hidden = block.resnets[0](hidden)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            hidden = resnet(hidden if attention is None else _attend(attention, hidden, block.causal))
        return hidden

    block.forward, block.causal = forward, frame_by_frame


def frame_by_frame(query: Tensor, key: Tensor, value: Tensor, frames: int) -> Tensor:
    """Attention ``[B, heads, tokens, head_dim]`` in which a frame sees itself and those before it."""
    size = key.shape[2] // frames
    seen = range(size, key.shape[2] + 1, size)
    parts = zip(query.split(size, dim=2), seen, strict=True)
    return torch.cat([scaled_dot_product_attention(q, key[:, :, :end], value[:, :, :end]) for q, end in parts], dim=2)


def _attend(attention: Any, hidden: Tensor, causal: Callable[..., Tensor]) -> Tensor:
    """Attention ``[B, C, T, H, W]`` by diffusers' own layers."""
    tokens = hidden.permute(0, 2, 3, 4, 1).flatten(1, 3)
    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    q, k, v = (
        layer(normed).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    out = attention.to_out[0](causal(q, k, v, hidden.shape[2]).transpose(1, 2).flatten(2))
    mixed = (out + tokens) / attention.rescale_output_factor
    back: Tensor = mixed.unflatten(1, hidden.shape[2:]).permute(0, 4, 1, 2, 3)
    return back
