"""The VAE of Open-Sora 1.2 (https://github.com/hpcaitech/Open-Sora, v1.2), with the published names.

A spatial VAE, diffusers' ``AutoencoderKL``, works on each frame. A temporal one, a causal 3D network like MAGVIT-2's
(https://arxiv.org/abs/2310.05737), shortens each chunk of 17 of its latents to 5. diffusers has no class for the two.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from einops import rearrange
from torch import Tensor, nn

SPATIAL_FACTOR = 0.18215
"""Scale of the spatial VAE's latents."""

_DEFAULT_SCALE, _DEFAULT_SHIFT = (3.85, 2.32, 2.33, 3.06), (-0.10, 0.34, 0.27, 0.98)

WriteFrame = Callable[[Tensor], None]
"""Takes the next decoded frame, ``[B, 3, 1, H, W]``."""


class CausalConv3d(nn.Module):
    """A convolution whose kernel looks back in time. Zeros stand before the first frame and around each."""

    def __init__(self, channels: int, out: int, kernel: int = 3, *, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.before = kernel - stride
        side = kernel // 2
        self.conv = nn.Conv3d(channels, out, kernel, stride=(stride, 1, 1), padding=(0, side, side), bias=bias)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[B, out, ceil(T / stride), H, W]`` for ``[B, channels, T, H, W]``."""
        convolved: Tensor = self.conv(F.pad(values, (0, 0, 0, 0, self.before, 0)))
        return convolved


class ResBlock(nn.Module):
    """Two convolutions behind norms, beside a shortcut."""

    def __init__(self, channels: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, out)
        self.conv1 = CausalConv3d(channels, out, bias=False)
        self.conv2 = CausalConv3d(out, out, bias=False)
        if channels != out:
            self.conv3 = CausalConv3d(channels, out, 1, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[B, out, T, H, W]`` for ``[B, channels, T, H, W]``."""
        inner = self.conv1(F.silu(self.norm1(values)))
        inner = self.conv2(F.silu(self.norm2(inner)))
        out: Tensor = inner + (self.conv3(values) if hasattr(self, "conv3") else values)
        return out


def _blocks(channels: int, out: int, count: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(ResBlock(out if i else channels, out, groups) for i in range(count))


def _through(layers: Any, values: Tensor) -> Tensor:
    for layer in layers:
        values = layer(values)
    return values


class TemporalEncoder(nn.Module):
    """Levels of blocks, between which time may be halved."""

    def __init__(
        self, channels: int, out: int, widths: Sequence[int], halved: Sequence[bool], blocks: int, groups: int
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv3d(channels, widths[0], bias=False)
        before = (widths[0], *widths[:-1])
        self.block_res_blocks = nn.ModuleList(
            _blocks(width, after, blocks, groups) for width, after in zip(before, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, stride=2) if halves else nn.Identity()
            for width, halves in zip(widths[:-1], halved, strict=True)
        )
        self.res_blocks = _blocks(widths[-1], widths[-1], blocks, groups)
        self.norm1, self.conv2 = nn.GroupNorm(groups, widths[-1]), CausalConv3d(widths[-1], out, 1)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[B, out, t, H, W]`` for ``[B, channels, T, H, W]``."""
        values = self.conv_in(values)
        for blocks, between in zip(self.block_res_blocks, (*self.conv_blocks, nn.Identity()), strict=True):
            values = between(_through(blocks, values))
        encoded: Tensor = self.conv2(F.silu(self.norm1(_through(self.res_blocks, values))))
        return encoded


class TemporalDecoder(nn.Module):
    """The encoder's levels backwards. Where time is doubled, a convolution gives both frames as channels."""

    def __init__(
        self, channels: int, out: int, widths: Sequence[int], doubled: Sequence[bool], blocks: int, groups: int
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, widths[-1])
        self.res_blocks = _blocks(widths[-1], widths[-1], blocks, groups)
        before = (*widths[1:], widths[-1])
        self.block_res_blocks = nn.ModuleList(
            _blocks(width, after, blocks, groups) for width, after in zip(before, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, 2 * width) if doubles else nn.Identity()
            for width, doubles in zip(widths[1:], doubled, strict=True)
        )
        self.norm1, self.conv_out = nn.GroupNorm(groups, widths[0]), CausalConv3d(widths[0], out)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[B, out, T, H, W]`` for ``[B, channels, t, H, W]``."""
        values = _through(self.res_blocks, self.conv1(values))
        for level in reversed(range(len(self.block_res_blocks))):
            values = _through(self.block_res_blocks[level], values)
            if level and not isinstance(self.conv_blocks[level - 1], nn.Identity):
                both = self.conv_blocks[level - 1](values)
                values = rearrange(both, "b (c two) t h w -> b c (t two) h w", two=2)
        decoded: Tensor = self.conv_out(F.silu(self.norm1(values)))
        return decoded


class TemporalVAE(nn.Module):
    """Shortens one chunk of the spatial VAE's latents. Zeros in front fill it up to whole groups of frames."""

    def __init__(
        self, channels: int, latent: int, embedded: int, widths: Sequence[int], halved: Sequence[bool], blocks: int,
        groups: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = 2 ** sum(halved)
        self.encoder = TemporalEncoder(channels, 2 * embedded, widths, halved, blocks, groups)
        self.decoder = TemporalDecoder(embedded, channels, widths, halved, blocks, groups)
        self.quant_conv = CausalConv3d(2 * embedded, 2 * latent, 1)
        self.post_quant_conv = CausalConv3d(latent, embedded, 1)

    def encode(self, values: Tensor) -> Tensor:
        """Return mean and log variance ``[B, 2 latent, ceil(T / group), h, w]`` for ``[B, channels, T, h, w]``."""
        filled = F.pad(values, (0, 0, 0, 0, -values.shape[2] % self.group, 0))
        moments: Tensor = self.quant_conv(self.encoder(filled))
        return moments

    def decode(self, latent: Tensor, frames: int) -> Tensor:
        """Return ``[B, channels, frames, h, w]`` for ``[B, latent, ceil(frames / group), h, w]``."""
        decoded: Tensor = self.decoder(self.post_quant_conv(latent))
        return decoded[:, :, decoded.shape[2] - frames :]


class SpatialVAE(nn.Module):
    """diffusers' VAE of single frames, under the published name."""

    def __init__(self, widths: Sequence[int], blocks: int, channels: int, groups: int) -> None:
        super().__init__()
        levels = len(widths)
        self.module = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(widths),
            layers_per_block=blocks,
            latent_channels=channels,
            norm_num_groups=groups,
        )


class VideoAutoencoderPipeline(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Both VAEs, one behind the other.

    Args:
        block_out_channels: widths of the spatial VAE's levels.
        layers_per_block: its blocks a level.
        filters: width of the temporal VAE's first level.
        channel_multipliers: widths of its levels, in ``filters``.
        temporal_downsample: whether time is halved after each level but the last.
        num_res_blocks: its blocks a level.
        in_out_channels: channels of the spatial VAE's latents.
        latent_embed_dim: channels of the latents.
        embed_dim: channels between them and the temporal VAE.
        norm_num_groups: groups of all norms.
        micro_frame_size: frames of a chunk.
    """

    scale: Tensor
    shift: Tensor

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        block_out_channels: Sequence[int] = (128, 256, 512, 512),
        layers_per_block: int = 2,
        filters: int = 128,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4),
        temporal_downsample: Sequence[bool] = (False, True, True),
        num_res_blocks: int = 4,
        in_out_channels: int = 4,
        latent_embed_dim: int = 4,
        embed_dim: int = 4,
        norm_num_groups: int = 32,
        micro_frame_size: int = 17,
    ) -> None:
        super().__init__()
        widths = [filters * factor for factor in channel_multipliers]
        self.spatial_vae = SpatialVAE(block_out_channels, layers_per_block, in_out_channels, norm_num_groups)
        self.temporal_vae = TemporalVAE(
            in_out_channels, latent_embed_dim, embed_dim, widths, temporal_downsample, num_res_blocks, norm_num_groups
        )
        for name, values in (("scale", _DEFAULT_SCALE), ("shift", _DEFAULT_SHIFT)):
            constants = torch.ones(latent_embed_dim) * (torch.tensor(values) if latent_embed_dim == 4 else 1.0)
            self.register_buffer(name, constants[None, :, None, None, None])

    @property
    def chunk(self) -> int:
        """Latent frames of a whole chunk."""
        group: int = self.temporal_vae.group
        return -(-int(self.config.micro_frame_size) // group)

    def encode_moments(self, pixels: Tensor, frame_done: Callable[[], None] = lambda: None) -> Iterator[Tensor]:
        """Yield the temporal mean and log variance of each chunk of pixels ``[B, 3, T, H, W]`` in -1..1.

        The posterior of the spatial VAE is its mean.

        Args:
            frame_done: called after each frame of the spatial VAE.
        """
        spatial = self.spatial_vae.module
        for several in pixels.split(int(self.config.micro_frame_size), dim=2):
            latents = []
            for frame in several.unbind(2):
                latents.append(spatial.encode(frame).latent_dist.mode() * SPATIAL_FACTOR)
                frame_done()
            yield self.temporal_vae.encode(torch.stack(latents, dim=2))

    def encode(self, pixels: Tensor, frame_done: Callable[[], None] = lambda: None) -> Tensor:
        """Return the normalised latent ``[B, C, t, h, w]`` of pixels ``[B, 3, T, H, W]`` in -1..1: both means."""
        means = [moments.chunk(2, dim=1)[0] for moments in self.encode_moments(pixels, frame_done)]
        return (torch.cat(means, dim=2) - self.shift) / self.scale

    def decode(self, latent: Tensor, frames: int) -> Tensor:
        """Return pixels ``[B, 3, frames, H, W]`` in -1..1 of a normalised latent; see ``decode_frames``."""
        decoded: list[Tensor] = []
        self.decode_frames(latent, frames, decoded.append)
        return torch.cat(decoded, dim=2)

    def decode_frames(self, latent: Tensor, frames: int, write: WriteFrame) -> None:
        """Decode a normalised latent ``[B, C, t, h, w]`` to pixels in -1..1, frame by frame.

        Args:
            frames: pixel frames.
            write: called for each frame.
        """
        spatial, size = self.spatial_vae.module, int(self.config.micro_frame_size)
        for part in (latent * self.scale + self.shift).split(self.chunk, dim=2):
            latents = self.temporal_vae.decode(part, min(size, frames))
            frames -= latents.shape[2]
            for frame in latents.unbind(2):
                write(spatial.decode(frame / SPATIAL_FACTOR).sample.unsqueeze(2))
