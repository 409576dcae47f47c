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
from ..vaes import MIN_TILE, VAE, TiledVAE
from ..vaes.own_tiles import LATENT_DIMS, REQUEST_DIMS
from .spatial import RowSplit

_WRITTEN_VALUES = 2**25
"""Values that are copied from a GPU at once, at most, but for those of a frame: 128 MiB."""

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
    if name == "pixels" and min(shape[-3:-1]) < vae.min_encoded_size * scale.spatial:
        raise InvalidRequest(
            f"pixels of {' x '.join(map(str, shape[-3:-1]))} are too small for this VAE: height and width must be at "
            f"least {vae.min_encoded_size * scale.spatial}"
        )
    _check_tile(tile, scale.spatial, vae.own_tile)


def _check_tile(tile: int, spatial: int, own: int) -> None:
    if tile and own:
        raise InvalidRequest(
            f"tile {tile}: this VAE works in tiles of its own, of {own} pixels, which are part of its exact result: "
            "set tile to 0"
        )
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
    writer = PixelWriter(vae, samples.shape, frames, split)
    unit_done = _progress_counter(on_progress, _units(vae, module, samples.shape, frames, encode=False))
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
    unit_done = _progress_counter(on_progress, _units(vae, module, samples.shape, frames, encode=True))
    latents = [
        # As in ComfyUI, pixels are rounded to the VAE's dtype after they are in -1..1.
        vae.encode(module, (sample[None].movedim(-1, 1) * 2.0 - 1.0).to(module.dtype), unit_done)
        for sample in samples
    ]
    latent = torch.cat(latents)
    if split:
        blocks = split.gather(latent, latent.ndim - 2)
        if not blocks:
            return torch.empty(0)
        latent = torch.cat(blocks, dim=-2)
    latent = latent.float()
    return rearrange(latent, "(b t) c h w -> b c t h w", b=pixels.shape[0]) if frame_by_frame else latent


def _units(vae: VAE, module: Any, shape: Sequence[int], frames: int, *, encode: bool) -> int:
    """Return how often ``decode`` or ``encode`` calls ``on_progress`` for samples of this shape."""
    if isinstance(vae, TiledVAE):
        return len(vae.parts(shape, REQUEST_DIMS if encode else LATENT_DIMS, encode=encode))
    count = vae.encode_progress_units if encode else vae.decode_progress_units
    return shape[0] * count(module, frames)


def _progress_counter(on_progress: ProgressCallback, total: int) -> Callable[[], None]:
    """Return a function that counts its calls and reports the count to ``on_progress``."""
    counts = iter(range(1, total + 1))
    return lambda: on_progress(next(counts), total)


class PixelWriter:
    """Writes the decoded frames of samples, in order, into one tensor ``[N, T', H', W', 3]``.

    With ``split``, rank 0 gathers all ranks' rows, and other ranks have no result. Frames go from a GPU to pinned
    memory while it computes the next ones, and the host waits for them when those are queued.

    Args:
        latents: shape of the latents, ``[N, C, T, H, W]`` or ``[N, C, H, W]``; with ``split``, of this rank's rows.
        frames: latent frames of a sample.
        split: how the ranks split the rows; None if one rank works alone.
    """

    def __init__(self, vae: VAE, latents: Sequence[int], frames: int, split: RowSplit | None = None) -> None:
        height, width = (size * vae.scale.spatial for size in latents[-2:])
        self._split, self._frame_shape = split, (height, width, 3)
        self._total, self._written = latents[0] * vae.pixel_frames(frames), 0
        full_height = split.from_local(height).total if split else height
        shape = (latents[0], vae.pixel_frames(frames), full_height, width, 3)
        self._at_once = max(1, _WRITTEN_VALUES // (full_height * width * 3))
        self._pixels = torch.empty(0 if split and split.axis.index else shape)
        self._arrive: Callable[[], None] = lambda: None

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
        for several in pixels.split(self._at_once):
            blocks = self._split.gather(several, 1) if self._split else [several]
            if blocks:
                self._start([block.float().add(1.0).div_(2.0).clamp_(0.0, 1.0) for block in blocks])
            self._written += len(several)

    def _start(self, blocks: Sequence[Tensor]) -> None:
        """Start copying frames from their blocks of rows, from the top down; wait for the frames before them."""
        wholes, begin = self._pixels.flatten(0, 1)[self._written :], 0
        copies: list[tuple[Tensor, Tensor]] = []
        for block in blocks:
            target = wholes[: len(block), begin : begin + block.shape[1]]
            copies.append((target, block.to("cpu", non_blocking=True)))  # torch makes it in pinned memory
            begin += block.shape[1]
        copied = torch.cuda.current_stream(blocks[0].device).record_event() if blocks[0].is_cuda else None
        self._arrive()

        def arrive() -> None:
            if copied:
                copied.synchronize()
            for target, values in copies:
                target.copy_(values)

        self._arrive = arrive

    def result(self) -> Tensor:
        """Return all pixels; an empty tensor on ranks without a result.

        Raises:
            InvalidRequest: there were fewer frames than the VAE's config promises.
        """
        if self._written < self._total:
            raise InvalidRequest(f"the VAE gave {self._written} frames, but its config.json promises {self._total}")
        self._arrive()
        return self._pixels
