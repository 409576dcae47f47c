"""STDiT3, the transformer of Open-Sora 1.2 (https://github.com/hpcaitech/Open-Sora, v1.2), with the published names.

diffusers has no class for it. Two things are more exact than in the authors' code, which casts the whole model to
bfloat16: the rotary frequencies and the positions are float32 in every dtype, and so is the timestep before its
embedding. In float32 the two agree.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from einops import rearrange
from torch import Tensor, nn

from .blocks import FeedForward, SpatialBlock, TemporalBlock, modulated, plain_norm

_WAVES = 256
"""Features of the sinusoids of the timestep and of the frame rate."""
_BASE = 10000.0
"""The slowest wavelength of all sinusoids, divided by 2 pi."""


class PatchEmbedder(nn.Module):
    """A linear layer over the values of each patch, as a convolution."""

    def __init__(self, patch: tuple[int, ...], channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, width, kernel_size=patch, stride=patch)  # type: ignore[arg-type]

    def forward(self, latent: Tensor) -> Tensor:
        """Return tokens ``[B * T, S, D]`` of a latent ``[B, C, T, H, W]`` of whole patches."""
        patches: Tensor = self.proj(latent)
        return rearrange(patches, "b d t h w -> (b t) (h w) d").contiguous()


class NumberEmbedder(nn.Module):
    """Embeds a number by its sinusoids and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the embedding ``[..., D]`` of numbers ``[...]``."""
        waves = get_timestep_embedding(numbers.flatten().float(), _WAVES, flip_sin_to_cos=True, downscale_freq_shift=0)
        embedded: Tensor = self.mlp(waves.to(self.mlp[0].weight.dtype))
        out: Tensor = embedded.unflatten(0, numbers.shape)
        return out


class CaptionEmbedder(nn.Module):
    """Maps the text to the model's width. ``y_embedding`` is the learned text that stands for no prompt."""

    def __init__(self, channels: int, width: int, tokens: int) -> None:
        super().__init__()
        self.y_proj = FeedForward(channels, width, width)
        self.register_buffer("y_embedding", torch.randn(tokens, channels) / channels**0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return ``[B, L, D]`` for text ``[B, L, channels]``."""
        embedded: Tensor = self.y_proj(text)
        return embedded


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the blocks and the head know of time.

    Attributes:
        embedded: the embedding of the timestep ``[B, D]``.
        given: the embedding of timestep 0 ``[B, D]``.
        modulation: of the blocks, for each frame ``[B, T, 6, D]``.
        x_mask: bool ``[B, T]``, False for given frames; None if no frame is given.
    """

    embedded: Tensor
    given: Tensor
    modulation: Tensor
    x_mask: Tensor | None


class FinalLayer(nn.Module):
    """Normalises and modulates tokens, and maps each to the values of its patch."""

    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.norm_final, self.linear = plain_norm(width), nn.Linear(width, values)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)

    def forward(self, tokens: Tensor, times: Times) -> Tensor:
        """Return ``[B * T, S, values]`` for tokens ``[B * T, S, D]``.

        As in the authors' code, tokens of given frames are normalised and modulated twice. What a model predicts for
        given frames has no use.
        """
        tokens = self._modulate(tokens, times.embedded)
        if times.x_mask is not None:
            frames = times.x_mask.flatten()[:, None, None]
            tokens = torch.where(frames, tokens, self._modulate(tokens, times.given))
        values: Tensor = self.linear(tokens)
        return values

    def _modulate(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Normalise and modulate tokens ``[B * T, S, D]`` by an embedding ``[B, D]``."""
        modulation = (self.scale_shift_table + time.unsqueeze(1)).unsqueeze(2)
        frames = len(tokens) // len(time)
        return modulated(self.norm_final(tokens), *modulation.repeat_interleave(frames, dim=0).unbind(1))


class RotaryFrequencies(nn.Module):
    """The frequencies of pairs of features, ``[head_dim / 2]``, always in float32.

    They are constants. A file in bfloat16 has rounded ones, so none are read.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.freqs: Tensor
        self.register_buffer("freqs", _BASE**-powers, persistent=False)

    def forward(self, frames: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[frames, head_dim / 2]``."""
        angles = torch.arange(frames, device=self.freqs.device)[:, None] * self.freqs
        return angles.cos(), angles.sin()


class STDiT3(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The transformer. Arguments have the names and defaults of the published ``config.json``.

    Args:
        input_sq_size: side in pixels of the square that positions are scaled to.
        in_channels: channels of the latent.
        patch_size: frames, rows and columns of a patch.
        hidden_size: features of a token.
        depth: pairs of a spatial and a temporal block.
        num_heads: attention heads.
        mlp_ratio: hidden features of a feed-forward, for each feature of a token.
        pred_sigma: whether it also predicts a variance for each channel, which has no use.
        caption_channels: features of the text.
        model_max_length: tokens of the learned text.
        qk_norm: whether queries and keys are normalised.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        input_sq_size: int = 512,
        in_channels: int = 4,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        pred_sigma: bool = True,
        caption_channels: int = 4096,
        model_max_length: int = 300,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        width, hidden = hidden_size, round(hidden_size * mlp_ratio)
        self.x_embedder = PatchEmbedder(tuple(patch_size), in_channels, width)
        self.t_embedder, self.fps_embedder = NumberEmbedder(width), NumberEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(caption_channels, width, model_max_length)
        self.spatial_blocks, self.temporal_blocks = (
            nn.ModuleList(kind(width, num_heads, hidden, normalised=qk_norm) for _ in range(depth))
            for kind in (SpatialBlock, TemporalBlock)
        )
        self.rope = RotaryFrequencies(width // num_heads)
        self.final_layer = FinalLayer(width, math.prod(patch_size) * in_channels * (2 if pred_sigma else 1))

    def forward(
        self,
        latent: Tensor,
        timestep: Tensor,
        text: Tensor,
        fps: Tensor,
        height: Tensor,
        width: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction ``[B, channels, T, H, W]``: data minus noise, then what ``pred_sigma`` says.

        Args:
            latent: ``[B, C, T, H, W]``.
            timestep: ``[B]`` in 0..1000; 1000 is noise.
            text: ``[B, L, caption_channels]``.
            fps: frames a second ``[B]``; 120 for a single frame.
            height: pixels ``[B]``. Positions are those of the first sample.
            width: pixels ``[B]``.
            mask: ``[B, L]``, True for text that is not padding; None if none is.
            x_mask: bool ``[B, T]``, False for frames that are given, which are modulated as at timestep 0; None if no
                frame is.
        """
        frames, rows, columns = latent.shape[2:]
        grid = self.grid(latent.shape[2:])
        tokens = self.embed_patches(latent, height[0], width[0])
        times = self.embed_time(timestep, fps, frames, x_mask)
        embedded, keys = self.y_embedder(text.to(tokens.dtype)), None if mask is None else mask.bool()[:, None, None]
        rotation = self.rope(frames)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            tokens = spatial(tokens, times.modulation, embedded, keys, rotation)
            tokens = temporal(tokens, times.modulation, embedded, keys, rotation)
        values = self.final_layer(tokens, times)
        sizes = dict(zip(("pt", "ph", "pw"), self.config.patch_size, strict=True))
        pattern = "(b t) (h w) (pt ph pw c) -> b c (t pt) (h ph) (w pw)"
        out: Tensor = rearrange(values, pattern, t=grid[0], h=grid[1], w=grid[2], **sizes)
        cropped: Tensor = out[:, :, :, :rows, :columns]
        return cropped

    def grid(self, size: Any) -> tuple[int, ...]:
        """Return the number of patches along each dim of a latent of that size, padded to whole patches."""
        return tuple(-(-length // patch) for length, patch in zip(size, self.config.patch_size, strict=True))

    def whole_patches(self, latent: Tensor) -> Tensor:
        """Fill up the last patches of a latent ``[B, C, T, H, W]`` with zeros."""
        missing = [-length % patch for length, patch in zip(latent.shape[2:], self.config.patch_size, strict=True)]
        return F.pad(latent, [side for last in reversed(missing) for side in (0, last)])

    def embed_patches(self, latent: Tensor, height: Tensor, width: Tensor) -> Tensor:
        """Return tokens ``[B * T, S, D]`` with their positions in the frame.

        Height and width are numbers of pixels, as tensors without dims.
        """
        tokens: Tensor = self.x_embedder(self.whole_patches(latent))
        scale = (height.float() * width.float()).sqrt() / self.config.input_sq_size
        positions = sinusoidal_positions(self.grid(latent.shape[2:])[1:], scale, tokens.shape[-1])
        return tokens + positions.to(tokens.dtype)

    def embed_time(self, timestep: Tensor, fps: Tensor, frames: int, x_mask: Tensor | None) -> Times:
        """Embed timesteps ``[B]`` and frame rates ``[B]`` for a number of frames. Given frames are at timestep 0."""
        rate = self.fps_embedder(fps)
        embedded, given = (self.t_embedder(time) + rate for time in (timestep, torch.zeros_like(timestep)))
        modulation, of_given = (self.t_block(each).unflatten(-1, (1, 6, -1)) for each in (embedded, given))
        if x_mask is None:
            modulation = modulation.expand(-1, frames, -1, -1)
        else:
            modulation = torch.where(x_mask[:, :, None, None], modulation, of_given)
        return Times(embedded=embedded, given=given, modulation=modulation, x_mask=x_mask)


def sinusoidal_positions(grid: tuple[int, ...], scale: Tensor, width: int) -> Tensor:
    """Return positions ``[rows * columns, width]`` in float32. The first half of the features is the column's.

    Args:
        grid: rows and columns.
        scale: how many times larger the image is than the square that positions are scaled to, along each side.
        width: features of a token.
    """
    base, quarter = round(math.sqrt(math.prod(grid))), width // 4
    powers = torch.arange(quarter, device=scale.device, dtype=torch.float32) / quarter
    waves = []
    for length in grid:
        steps = torch.arange(length, device=scale.device, dtype=torch.float32) / scale * (base / length)
        angles = steps[:, None] * _BASE**-powers
        waves.append(torch.cat([angles.sin(), angles.cos()], dim=-1))
    (rows, columns), (by_row, by_column) = grid, waves
    both = [by_column.expand(rows, -1, -1), by_row[:, None].expand(-1, columns, -1)]
    return torch.cat(both, dim=-1).flatten(0, 1)
