"""Untiled decode and encode, sample by sample, with progress. What differs between VAE classes is in ``vaes``.

On several ranks, each holds the rows of the latent and of the pixels that ``RowSplit`` gives it. Decode and encode then
run inside ``spatial.split``, and rank 0 gets the result.
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
"""Called with the number of finished parts and the total number of parts. May raise to stop the work."""


def check(metas: tuple[TensorMeta, ...], kind: VAE, *, name: str, tile: int = 0) -> None:
    """Check a ``Decode`` or an ``Encode`` by its header.

    Args:
        metas: the tensors that the request carries.
        kind: the VAE.
        name: ``latent`` for a ``Decode``, ``pixels`` for an ``Encode``.
        tile: height and width of a tile in pixels; 0 for no tiling.

    Raises:
        InvalidRequest: a tensor or ``tile`` does not fit the VAE. The message names the shape and what would work.
    """
    scale, dims = kind.scale, (5,) if kind.scale.video else (4, 5)
    if [meta.name for meta in metas] != [name] or len(metas[0].shape) not in dims or 0 in metas[0].shape:
        counts = " or ".join(map(str, dims))
        raise InvalidRequest(f"the VAE takes exactly one tensor: {name} of {counts} dims, none of them empty")
    shape = metas[0].shape
    if name == "latent" and shape[1] != scale.channels:
        raise InvalidRequest(f"the latent has {shape[1]} channels and this VAE takes {scale.channels}")
    if name == "latent" and min(shape[-2:]) < kind.min_latent_size:
        raise InvalidRequest(
            f"a latent of {list(shape[-2:])} is too small for this VAE: height and width must be at least "
            f"{kind.min_latent_size}"
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
    kind: VAE,
    module: Any,
    latent: Tensor,
    on_progress: ProgressCallback,
    rows: RowSplit | None = None,
    *,
    clamp: bool = True,
) -> Tensor:
    """Decode latents ``[B, C, T, H, W]`` to pixels ``[B, T', H', W', 3]``, float32 on the CPU.

    Latents ``[B, C, H, W]`` give pixels ``[B, H', W', 3]``. An image VAE decodes a video frame by frame. Every decoded
    part is written directly to its place in the result.

    Args:
        kind: the VAE's class.
        module: diffusers' module.
        latent: the latents; with ``rows``, only this rank's rows of them.
        on_progress: called after each part.
        rows: the split by rows; None if one rank decodes alone.
        clamp: map the VAE's values from -1..1 to 0..1 and clamp them. Otherwise leave them as they are.

    Returns:
        The pixels on rank 0, an empty tensor on other ranks.

    Raises:
        InvalidRequest: the VAE's output does not match its config.
    """
    frame_by_frame = latent.ndim == 5 and not kind.scale.video
    samples = rearrange(latent, "b c t h w -> (b t) c h w") if frame_by_frame else latent
    frames = samples.shape[2] if samples.ndim == 5 else 1
    writer = _PixelWriter(kind, samples, frames, rows, clamp)
    part_done = _part_counter(on_progress, len(samples) * kind.decode_parts(module, frames))
    for sample in samples:
        kind.decode(module, sample[None].to(module.dtype), writer.write, part_done)
    pixels = writer.result()
    if rows and rows.axis.index:
        return pixels
    pixels = pixels if samples.ndim == 5 else pixels[:, 0]
    return rearrange(pixels, "(b t) h w c -> b t h w c", b=latent.shape[0]) if frame_by_frame else pixels


def encode(
    kind: VAE, module: Any, pixels: Tensor, on_progress: ProgressCallback, rows: RowSplit | None = None
) -> Tensor:
    """Encode pixels ``[B, T, H, W, 3]`` or ``[B, H, W, 3]`` in 0..1 to float32 latents, the posterior's mode.

    ``T' = 1 + (T - 1) // temporal``. As in ComfyUI, frames beyond the last complete group yield no latent frame. An
    image VAE encodes a video frame by frame.

    Args:
        kind: the VAE's class.
        module: diffusers' module.
        pixels: the pixels; with ``rows``, only this rank's rows of them.
        on_progress: called after each part.
        rows: the split by rows; None if one rank encodes alone.

    Returns:
        Latents ``[B, C, T', H', W']`` or ``[B, C, H', W']`` on rank 0, an empty tensor on other ranks.
    """
    frame_by_frame = pixels.ndim == 5 and not kind.scale.video
    samples = rearrange(pixels, "b t h w c -> (b t) h w c") if frame_by_frame else pixels
    frames = kind.encoded_frames(samples.shape[1]) if samples.ndim == 5 else 1
    samples = samples[:, :frames] if samples.ndim == 5 else samples
    part_done = _part_counter(on_progress, len(samples) * kind.encode_parts(module, frames))
    latents = [
        kind.encode(module, sample[None].to(module.dtype).movedim(-1, 1) * 2.0 - 1.0, part_done) for sample in samples
    ]
    latent = torch.cat(latents).float()
    if rows:
        blocks = rows.gather(latent, latent.ndim - 2)
        if not blocks:
            return torch.empty(0)
        latent = torch.cat(blocks, dim=-2)
    return rearrange(latent, "(b t) c h w -> b c t h w", b=pixels.shape[0]) if frame_by_frame else latent


def _part_counter(on_progress: ProgressCallback, total: int) -> Callable[[], None]:
    """Return a function that counts its calls and reports the count to ``on_progress``."""
    counts = iter(range(1, total + 1))
    return lambda: on_progress(next(counts), total)


class _PixelWriter:
    """Writes the decoded frames of samples, in order, into one tensor ``[N, T', H', W', 3]``.

    With ``rows``, rank 0 gathers all ranks' rows, and other ranks have no result.

    Args:
        kind: the VAE's class.
        samples: latents ``[N, C, T, H, W]`` or ``[N, C, H, W]``; only this rank's rows of them if ``rows`` is given.
        frames: latent frames of a sample.
        rows: the split by rows, or None.
        clamp: see ``decode``.
    """

    def __init__(self, kind: VAE, samples: Tensor, frames: int, rows: RowSplit | None, clamp: bool) -> None:
        height, width = (size * kind.scale.spatial for size in samples.shape[-2:])
        self._rows, self._clamp, self._frame_shape = rows, clamp, (height, width, 3)
        self._total, self._written = len(samples) * kind.pixel_frames(frames), 0
        full_height = rows.from_local(height).total if rows else height
        shape = (len(samples), kind.pixel_frames(frames), full_height, width, 3)
        self._pixels = torch.empty(0 if rows and rows.axis.index else shape)

    def write(self, part: Tensor) -> None:
        """Write the next frames, ``[1, 3, t, H', W']`` in -1..1.

        Raises:
            InvalidRequest: there are more frames, or frames of another size, than the VAE's config promises.
        """
        frames = part[0].movedim(0, -1)
        if self._written + len(frames) > self._total or frames.shape[1:] != self._frame_shape:
            raise InvalidRequest(
                f"the VAE gives pixels of shape {list(frames.shape)}, but its config.json promises "
                f"{[self._total - self._written, *self._frame_shape]}: the config does not belong to the weights"
            )
        for i, frame in enumerate(frames, self._written):
            self._write_frame(i, self._rows.gather(frame, 0) if self._rows else [frame])
        self._written += len(frames)

    def _write_frame(self, index: int, blocks: Sequence[Tensor]) -> None:
        """Write one frame from its blocks of rows, from the top down. ``blocks`` is empty on ranks without a result."""
        begin = 0
        for block in blocks:
            pixels = block.float()
            target = self._pixels.flatten(0, 1)[index, begin : begin + len(block)]
            target.copy_(((pixels + 1.0) / 2.0).clamp_(0.0, 1.0) if self._clamp else pixels)
            begin += len(block)

    def result(self) -> Tensor:
        """Return all pixels; an empty tensor on ranks without a result.

        Raises:
            InvalidRequest: there were fewer frames than the VAE's config promises.
        """
        if self._written < self._total:
            raise InvalidRequest(f"the VAE gave {self._written} frames, but its config.json promises {self._total}")
        return self._pixels
