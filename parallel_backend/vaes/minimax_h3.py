"""MiniMax-H3's video VAE: a convolutional encoder, and a transformer as its decoder.

Both work in clips of 17 frames and in tiles of 256 pixels. The latents of neighbouring clips overlap by two frames, so
their pixels fade into each other. All this is part of the result: the model was trained and published with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import ClipSteps, LatentScale, Scaling, WriteFrames
from .own_tiles import Joiner, Spans, TiledVAE, fade

CHANNELS, CLIP, DROPPED = 24, 17, 3
SPATIAL, TEMPORAL = (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1)
_PIXELS = (0.485, 0.229), (0.456, 0.224), (0.406, 0.225)
"""Mean and standard deviation of ImageNet's pixels in 0..1 by colour, by which the modules' pixels are normalised."""


@dataclass(frozen=True, kw_only=True)
class _Clips:
    """How clips lie in a video. A clip of 17 frames has 5 latent frames, of which the first stands for one frame.

    Attributes:
        frames: pixel frames of a clip.
        dropped: latent frames that are dropped at the end of an encoded video.
        ratio: pixel frames of a latent frame.
    """

    frames: int
    dropped: int
    ratio: int

    @property
    def latents(self) -> int:
        """Latent frames of a clip."""
        return ceil(self.frames / self.ratio)

    @property
    def overlap(self) -> int:
        """Latent frames that a clip is decoded with besides its own: the first ones of the next clip."""
        return -self.dropped % self.latents

    @property
    def surplus(self) -> int:
        """Decoded frames before the first one of a clip."""
        return -self.frames % self.ratio

    def pixel_frames(self, latents: int) -> int:
        """Return how many pixel frames latent frames stand for."""
        whole, rest = divmod(latents, self.latents)
        return whole * self.frames + (self.ratio * rest - self.surplus if rest else 0)

    def latent_frames(self, frames: int) -> int:
        """Return how many latent frames a video is encoded to."""
        return 1 if frames == 1 else ceil(frames / self.frames) * self.latents - self.dropped

    def decoded(self, latents: int) -> int:
        """Return how many clips a latent of more than one frame is decoded in."""
        return max(1, ceil((latents + self.dropped) / self.latents) - (self.dropped > 0))


class MiniMaxH3(TiledVAE):
    """``AutoencoderKLMiniMaxH3``. Latents are normalised, pixels beyond it are in -1..1 like those of other VAEs."""

    own_module: ClassVar[str] = "minimax_h3_module"
    since: ClassVar[str] = "0.40"
    own_tile: ClassVar[int] = 256
    own_overlap: ClassVar[int] = 64
    min_encoded_size: ClassVar[int] = 2
    working_dtypes = (torch.float16,)

    @property
    def scale(self) -> LatentScale:
        clips = self._clips
        steps = ClipSteps(
            frames=clips.frames,
            latents=clips.latents,
            first_frames=clips.pixel_frames(clips.overlap),
            first_latents=clips.overlap,
        )
        return LatentScale(
            channels=self.config.get("latent_channels", CHANNELS),
            spatial=prod(self.config.get("spatial_downsample_factors", SPATIAL)),
            temporal=clips.ratio,
            clips=steps,
        )

    @property
    def scaling(self) -> Scaling | None:
        return None

    @property
    def _clips(self) -> _Clips:
        return _Clips(
            frames=self.config.get("clip_length", CLIP),
            dropped=self.config.get("token_drop", DROPPED),
            ratio=prod(self.config.get("temporal_downsample_factors", TEMPORAL)),
        )

    def pixel_frames(self, frames: int) -> int:
        return self._clips.pixel_frames(frames)

    def latent_frames(self, frames: int) -> int:
        return self._clips.latent_frames(frames)

    def encoded_frames(self, frames: int) -> int:
        """Return ``frames``: the last one is repeated up to a whole clip."""
        return frames

    def prepare(self, module: Any) -> None:
        """Let attention give zeros instead of numbers that are none, as ComfyUI's does.

        The decoder's norms work on float32, and torch has a fused kernel for that only with weights in float32.
        """
        for block in module.decoder.transformer_blocks:
            block.norm1.float()
            block.norm2.float()
            block.attn.to_out[0].register_forward_pre_hook(_finite)

    def clips(self, frames: int, *, encode: bool) -> tuple[tuple[int, int], ...]:
        clips = self._clips
        if frames == 1:
            return ((0, 1),)
        if encode:
            return tuple((first, clips.frames) for first in range(0, frames, clips.frames))
        count = clips.decoded(frames)
        return tuple((clip * clips.latents, clips.latents + clips.overlap) for clip in range(count))

    def tile_frames(self, frames: int, *, encode: bool) -> int:
        return ceil(frames / self._clips.ratio) if encode else frames * self._clips.ratio

    def code_tile(self, module: Any, tile: Tensor, *, encode: bool) -> Tensor:
        if encode:
            pixels = tile.add(1.0).mul_(0.5)
            for colour, (mean, std) in zip(pixels.unbind(1), _PIXELS, strict=True):
                colour.sub_(mean).div_(std)
            latent: Tensor = module.quant_conv(module.encoder(pixels)).chunk(2, dim=1)[0]
            return latent.contiguous()
        raw = tile * _by_channel(module.latent_std, tile) + _by_channel(module.latent_mean, tile)
        decoded: Tensor = module.decoder(module.post_quant_conv(raw))
        return decoded

    def joiner(self, module: Any, shape: Sequence[int], write: WriteFrames | None) -> Joiner:
        frames, height, width = shape
        encode = write is None
        rows, columns = (self.spans(length, encode=encode) for length in (height, width))
        spatial = self.scale.spatial
        if write is None:
            return _Latent(module, rows.times(1, spatial), columns.times(1, spatial), self._clips, frames)
        return _Pixels(write, rows.times(spatial), columns.times(spatial), self._clips, frames)


class _Latent(Joiner):
    """Joins the clips of a latent, and normalises it."""

    def __init__(self, module: Any, rows: Spans, columns: Spans, clips: _Clips, frames: int) -> None:
        super().__init__(rows, columns)
        self._module, self._frames, self._latents = module, clips.latent_frames(frames), list[Tensor]()

    def _join(self, clip: Tensor) -> None:
        self._latents.append(clip)

    def result(self) -> Tensor:
        raw = torch.cat(self._latents, dim=2)[:, :, : self._frames].float()
        return (raw - _by_channel(self._module.latent_mean, raw)) / _by_channel(self._module.latent_std, raw)


class _Pixels(Joiner):
    """Joins the frames of clips, and writes them."""

    def __init__(self, write: WriteFrames, rows: Spans, columns: Spans, clips: _Clips, latents: int) -> None:
        super().__init__(rows, columns)
        self._write, self._clips = write, clips
        self._left, self._to_come = clips.pixel_frames(latents), 1 if latents == 1 else clips.decoded(latents)
        self._ahead: Tensor | None = None

    def _join(self, clip: Tensor) -> None:
        clips = self._clips
        end = clips.latents * clips.ratio
        own, ahead = clip[:, :, :end], clip[:, :, end + clips.surplus :]
        own = own[:, :, clips.surplus :] if clip.shape[2] > clips.ratio else own[:, :, -1:]
        if self._ahead is not None:
            fade(self._ahead, own, 2)
        self._emit(own)
        self._to_come -= 1
        self._ahead = ahead.clone() if self._to_come and ahead.shape[2] else None
        if not self._to_come:
            self._emit(ahead)

    def _emit(self, frames: Tensor) -> None:
        """Write what is left to write of some frames, and change them."""
        frames = frames[:, :, : self._left].float()
        self._left -= frames.shape[2]
        if frames.shape[2]:
            for colour, (mean, std) in zip(frames.unbind(1), _PIXELS, strict=True):
                colour.mul_(2.0 * std).add_(2.0 * mean - 1.0)
            self._write(frames)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel, for a video ``[1, C, T, H, W]``."""
    return values.to(like).view(1, -1, 1, 1, 1)


def _finite(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].nan_to_num_(0.0),)
