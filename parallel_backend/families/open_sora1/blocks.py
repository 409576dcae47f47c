"""The layers of STDiT3's blocks, with the published names."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Attention of all tokens of a row to one another. Queries and keys are normalised, then rotated."""

    def __init__(self, width: int, heads: int, *, normalised: bool) -> None:
        super().__init__()
        self.num_heads, head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if normalised else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6) if normalised else nn.Identity()

    def forward(self, tokens: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return the output ``[B, S, D]`` for tokens ``[B, S, D]``.

        Args:
            rotation: cosines and sines ``[S, head_dim / 2]``; None for no positions.
        """
        q, k, v = rearrange(self.qkv(tokens), "b s (three h d) -> three b h s d", three=3, h=self.num_heads).unbind()
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotated(q, *rotation), rotated(k, *rotation)
        out = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.proj(rearrange(out, "b h s d -> b s (h d)"))
        return projected


class CrossAttention(nn.Module):
    """Attention of tokens to the text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_linear, self.kv_linear = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output ``[B, S, D]`` for tokens ``[B, S, D]``.

        Args:
            text: ``[B, L, D]``.
            mask: bool ``[B, 1, 1, L]``, True for text that counts; None if all does.
        """
        q = rearrange(self.q_linear(tokens), "b s (h d) -> b h s d", h=self.num_heads)
        k, v = rearrange(self.kv_linear(text), "b l (two h d) -> two b h l d", two=2, h=self.num_heads).unbind()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: Tensor = self.proj(rearrange(out, "b h s d -> b s (h d)"))
        return projected


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them (its tanh form)."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[..., out]`` for ``[..., width]``."""
        out: Tensor = self.fc2(F.gelu(self.fc1(tokens), approximate="tanh"))
        return out


class SpatialBlock(nn.Module):
    """Attention within each frame, cross-attention to the text and a feed-forward. The time modulates both ends.

    Tokens are ``[B * T, S, D]``, one row for each frame.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, normalised: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = plain_norm(width), plain_norm(width)
        self.attn = SelfAttention(width, heads, normalised=normalised)
        self.cross_attn = CrossAttention(width, heads)
        self.mlp = FeedForward(width, hidden, width)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(
        self, tokens: Tensor, modulation: Tensor, text: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the next tokens.

        Args:
            modulation: ``[B, T, 6, D]``, one for each frame.
            text: ``[B, L, D]``.
            mask: see ``CrossAttention``.
            rotation: cosines and sines ``[T, head_dim / 2]`` of the frames.
        """
        values = (self.scale_shift_table + modulation).flatten(0, 1).unsqueeze(2).unbind(1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = values
        tokens = tokens + gate * self.attend(modulated(self.norm1(tokens), shift, scale), len(text), rotation)
        frames = len(tokens) // len(text)
        by_sample = rearrange(tokens, "(b t) s d -> b (t s) d", t=frames)
        tokens = tokens + rearrange(self.cross_attn(by_sample, text, mask), "b (t s) d -> (b t) s d", t=frames)
        out: Tensor = tokens + mlp_gate * self.mlp(modulated(self.norm2(tokens), mlp_shift, mlp_scale))
        return out

    def attend(self, tokens: Tensor, batch: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output of self-attention within each frame. ``batch`` is the number of samples."""
        attended: Tensor = self.attn(tokens)
        return attended


class TemporalBlock(SpatialBlock):
    """The same with attention of each position to itself in all frames."""

    def attend(self, tokens: Tensor, batch: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output of self-attention along time."""
        by_position = rearrange(tokens, "(b t) s d -> (b s) t d", b=batch)
        attended: Tensor = self.attn(by_position, rotation)
        return rearrange(attended, "(b s) t d -> (b t) s d", b=batch)


def rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbouring features of ``[B, heads, S, head_dim]`` by angles ``[S, head_dim / 2]``."""
    even, odd = values.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(values.dtype)


def plain_norm(width: int) -> nn.LayerNorm:
    """Return a norm without weights."""
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


def modulated(values: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale values by ``1 + scale`` and shift them."""
    return values * (1 + scale) + shift
