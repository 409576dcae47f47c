"""HunyuanVideo's VAE, untiled.

Its attention is frame-causal: a frame attends to itself and to earlier frames. It runs on the queries of one frame at a
time, which needs no mask over all pairs of tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .base import VAE, LatentScale, Scaling, scaled_by_factor


class HunyuanVideo(VAE):
    """``AutoencoderKLHunyuanVideo``."""

    working_dtypes = (torch.bfloat16, torch.float16)

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
        """Turn off diffusers' default tiling over time, whose blending changes the result, and the attention mask."""
        module.use_framewise_encoding = module.use_framewise_decoding = False
        for half in (module.encoder, module.decoder):
            _replace_attention(half.mid_block)


def _replace_attention(block: Any) -> None:
    """Replace a mid block's ``forward``, which would build a mask of ``(T H W) ** 2`` values.

    The new one calls ``block.frame_causal_attention``, which a split by rows replaces in its turn.
    """

    def forward(hidden: Tensor) -> Tensor:
        hidden = block.resnets[0](hidden)
        for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attention is not None:
                hidden = _attend(attention, hidden, block.frame_causal_attention)
            hidden = resnet(hidden)
        return hidden

    block.forward, block.frame_causal_attention = forward, frame_causal_attention


def frame_causal_attention(query: Tensor, key: Tensor, value: Tensor, frames: int) -> Tensor:
    """Attend with each frame to itself and to earlier frames.

    Args:
        query: ``[B, heads, tokens, head_dim]``, with the tokens of a frame next to each other.
        key: shaped like ``query``.
        value: shaped like ``query``.
        frames: number of frames, which all have the same number of tokens.
    """
    frame_tokens = key.shape[2] // frames
    ends = range(frame_tokens, key.shape[2] + 1, frame_tokens)
    parts = zip(query.split(frame_tokens, dim=2), ends, strict=True)
    return torch.cat([scaled_dot_product_attention(q, key[:, :, :end], value[:, :, :end]) for q, end in parts], dim=2)


def _attend(attention: Any, hidden: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Run one of diffusers' attention layers on ``[B, C, T, H, W]``, with ``attend`` for the attention itself."""
    frames, height, width = hidden.shape[2:]
    tokens = rearrange(hidden, "b c t h w -> b (t h w) c")
    normed = attention.group_norm(tokens.transpose(1, 2)).transpose(1, 2)
    q, k, v = (
        rearrange(layer(normed), "b tokens (heads d) -> b heads tokens d", heads=attention.heads)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    out = attention.to_out[0](rearrange(attend(q, k, v, frames), "b heads tokens d -> b tokens (heads d)"))
    mixed: Tensor = (out + tokens) / attention.rescale_output_factor
    return rearrange(mixed, "b (t h w) c -> b c t h w", t=frames, h=height, w=width)
