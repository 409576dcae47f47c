"""Decode and encode requests: the check of the header, and the work, sample by sample, with progress.

What differs between VAE classes is in ``vaes``. A tiled request calls ``decode`` or ``encode`` once for each tile
(``tiles``). An untiled one on several ranks calls them inside ``spatial.split``: each rank holds the rows of the latent
and of the pixels that ``RowSplit`` gives it, and rank 0 gets the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..errors import InvalidRequest
from ..protocol.frames import TensorMeta
from ..vaes import MIN_TILE, VAE
from .spatial import RowSplit

ProgressCallback = Callable[[int, int], None]
"""Called after each progress unit (see ``VAE.decode_progress_units``), with the number of finished units and the total.

May raise to stop the work.
"""


def check_request(metas: tuple[TensorMeta, ...], vae: VAE, *, name: str, tile: int = 0) -> None:
    """Check a ``Decode`` or ``Encode`` request against the VAE, from its header alone.

    Args:
        name: ``latent`` for a ``Decode``, ``pixels`` for an ``Encode``.
        tile: height and width of a tile in pixels; 0 for no tiling.

    Raises:
        InvalidRequest: a tensor or ``tile`` does not fit the VAE. The message names the shape and what would work.
    """
    scale, dims = vae.scale, (5,) if vae.scale.video else (4, 5)
    if [meta.name for meta in metas] != [name] or len(metas[0].shape) not in dims or 0 in metas[0].shape:
        counts = " or ".join(map(str, dims))
        raise InvalidRequest(f"the VAE takes exactly one tensor: {name} of {counts} dims, none of them empty")
    shape = metas[0].shape
    if name == "latent" and shape[1] != scale.channels:
        raise InvalidRequest(f"the latent has {shape[1]} channels and this VAE takes {scale.channels}")
    if name == "latent" and min(shape[-2:]) < vae.min_latent_size:
        raise InvalidRequest(
            f"a latent of {list(shape[-2:])} is too small for this VAE: height and width must be at least "
            f"{vae.min_latent_size}"
        )
    if name == "pixels" and (shape[-1] != 3 or any(size % scale.spatial for size in shape[-3:-1])):
        raise InvalidRequest(
            f"pixels of shape {list(shape)} do not fit: this VAE takes [batch, frames, height, width, 3], or images "
            f"without frames, with a height and width that are multiples of {scale.spatial}"
        )
    _check_tile(tile, scale.spatial)


def _check_tile(tile: int, spatial: int) -> None:
    if tile and (tile % spatial or tile < MIN_TILE * spatial):
        raise InvalidRequest(
            f"tile {tile}: this VAE takes tiles of multiples of {spatial} pixels, "
            f"at least {MIN_TILE * spatial}, or 0 for no tiling"
        )


def decode(
    vae: VAE,
    module: Any,
    latent: Tensor,
    on_progress: ProgressCallback,
    split: RowSplit | None = None,
) -> Tensor:
    """Decode latents ``[B, C, T, H, W]`` to pixels ``[B, T', H', W', 3]``, float32 in 0..1 on the CPU.

    Latents ``[B, C, H, W]`` give pixels ``[B, H', W', 3]``. An image VAE decodes a video frame by frame. Decoded
    frames are written directly to their place in the result.

    Args:
        latent: the latents; with ``split``, only this rank's rows of them.
        on_progress: called after each progress unit (see ``VAE.decode_progress_units``).
        split: how the ranks split the rows; None if one rank works alone.

    Returns:
        The pixels on rank 0, an empty tensor on other ranks.

    Raises:
        InvalidRequest: the VAE's output does not match its config.
    """
    frame_by_frame = latent.ndim == 5 and not vae.scale.video
    samples = rearrange(latent, "b c t h w -> (b t) c h w") if frame_by_frame else latent
    frames = samples.shape[2] if samples.ndim == 5 else 1
    writer = _PixelWriter(vae, samples, frames, split)
    unit_done = _progress_counter(on_progress, len(samples) * vae.decode_progress_units(module, frames))
    for sample in samples:
        vae.decode(module, sample[None].to(module.dtype), writer.write, unit_done)
    pixels = writer.result()
    if split and split.axis.index:
        return pixels
    pixels = pixels if samples.ndim == 5 else pixels[:, 0]
    return rearrange(pixels, "(b t) h w c -> b t h w c", b=latent.shape[0]) if frame_by_frame else pixels


def encode(
    vae: VAE, module: Any, pixels: Tensor, on_progress: ProgressCallback, split: RowSplit | None = None
) -> Tensor:
    """Encode pixels ``[B, T, H, W, 3]`` or ``[B, H, W, 3]`` in 0..1 to float32 latents, the posterior's mode.

    ``T' = 1 + (T - 1) // temporal``. As in ComfyUI, frames beyond the last complete group yield no latent frame. An
    image VAE encodes a video frame by frame.

    Args:
        pixels: the pixels; with ``split``, only this rank's rows of them.
        on_progress: called after each progress unit (see ``VAE.encode_progress_units``).
        split: how the ranks split the rows; None if one rank works alone.

    Returns:
        Latents ``[B, C, T', H', W']`` or ``[B, C, H', W']`` on rank 0, an empty tensor on other ranks.
    """
    frame_by_frame = pixels.ndim == 5 and not vae.scale.video
    samples = rearrange(pixels, "b t h w c -> (b t) h w c") if frame_by_frame else pixels
    frames = vae.encoded_frames(samples.shape[1]) if samples.ndim == 5 else 1
    samples = samples[:, :frames] if samples.ndim == 5 else samples
    unit_done = _progress_counter(on_progress, len(samples) * vae.encode_progress_units(module, frames))
    latents = [
        vae.encode(module, sample[None].to(module.dtype).movedim(-1, 1) * 2.0 - 1.0, unit_done) for sample in samples
    ]
    latent = torch.cat(latents).float()
    if split:
        blocks = split.gather(latent, latent.ndim - 2)
        if not blocks:
            return torch.empty(0)
        latent = torch.cat(blocks, dim=-2)
    return rearrange(latent, "(b t) c h w -> b c t h w", b=pixels.shape[0]) if frame_by_frame else latent


def _progress_counter(on_progress: ProgressCallback, total: int) -> Callable[[], None]:
    """Return a function that counts its calls and reports the count to ``on_progress``."""
    counts = iter(range(1, total + 1))
    return lambda: on_progress(next(counts), total)


class _PixelWriter:
    """Writes the decoded frames of samples, in order, into one tensor ``[N, T', H', W', 3]``.

    With ``split``, rank 0 gathers all ranks' rows, and other ranks have no result.

    Args:
        samples: latents ``[N, C, T, H, W]`` or ``[N, C, H, W]``; only this rank's rows of them if ``split`` is given.
        frames: latent frames of a sample.
        split: how the ranks split the rows; None if one rank works alone.
    """

    def __init__(self, vae: VAE, samples: Tensor, frames: int, split: RowSplit | None) -> None:
        height, width = (size * vae.scale.spatial for size in samples.shape[-2:])
        self._split, self._frame_shape = split, (height, width, 3)
        self._total, self._written = len(samples) * vae.pixel_frames(frames), 0
        full_height = split.from_local(height).total if split else height
        shape = (len(samples), vae.pixel_frames(frames), full_height, width, 3)
        self._pixels = torch.empty(0 if split and split.axis.index else shape)

    def write(self, frames: Tensor) -> None:
        """Write the next frames, ``[1, 3, t, H', W']`` in -1..1.

        Raises:
            InvalidRequest: there are more frames, or frames of another size, than the VAE's config promises.
        """
        pixels = frames[0].movedim(0, -1)
        if self._written + len(pixels) > self._total or pixels.shape[1:] != self._frame_shape:
            raise InvalidRequest(
                f"the VAE gives pixels of shape {list(pixels.shape)}, but its config.json promises "
                f"{[self._total - self._written, *self._frame_shape]}: the config does not belong to the weights"
            )
        for i, frame in enumerate(pixels, self._written):
            self._write_frame(i, self._split.gather(frame, 0) if self._split else [frame])
        self._written += len(pixels)

    def _write_frame(self, index: int, blocks: Sequence[Tensor]) -> None:
        """Write one frame from its blocks of rows, from the top down. ``blocks`` is empty on ranks without a result."""
        begin = 0
        for block in blocks:
            target = self._pixels.flatten(0, 1)[index, begin : begin + len(block)]
            target.copy_(((block.float() + 1.0) / 2.0).clamp_(0.0, 1.0))
            begin += len(block)

    def result(self) -> Tensor:
        """Return all pixels; an empty tensor on ranks without a result.

        Raises:
            InvalidRequest: there were fewer frames than the VAE's config promises.
        """
        if self._written < self._total:
            raise InvalidRequest(f"the VAE gave {self._written} frames, but its config.json promises {self._total}")
        return self._pixels
