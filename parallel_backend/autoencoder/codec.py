"""Decode and encode, untiled, sample by sample with progress. What a VAE class is like is in ``vaes``.

Where several ranks do it together, each has the rows of the latent and of the pixels that ``Rows`` says, inside of
``spatial.split``, and the first one has the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..protocol.frames import TensorMeta
from ..vaes import SMALLEST_TILE, VAE
from .spatial import Rows

Tick = Callable[[int, int], None]
"""Called with the number of parts done and the total; may raise to end the work."""


def check(metas: tuple[TensorMeta, ...], kind: VAE, *, name: str, tile: int = 0) -> None:
    """Check a ``Decode`` (``name="latent"``) or an ``Encode`` (``name="pixels"``) by its header.

    Raises:
        InvalidRequest: names the shape and what would work.
    """
    scale, dims = kind.scale, (5,) if kind.scale.video else (4, 5)
    if [meta.name for meta in metas] != [name] or len(metas[0].shape) not in dims or 0 in metas[0].shape:
        counts = " or ".join(map(str, dims))
        raise InvalidRequest(f"the VAE takes one tensor {name} of {counts} dims, none of them empty")
    shape = metas[0].shape
    if name == "latent" and shape[1] != scale.channels:
        raise InvalidRequest(f"the latent has {shape[1]} channels and this VAE takes {scale.channels}")
    if name == "latent" and min(shape[-2:]) < kind.smallest:
        raise InvalidRequest(
            f"a latent of {list(shape[-2:])} is too small for this VAE: height and width need {kind.smallest} or more"
        )
    if name == "pixels" and (shape[-1] != 3 or any(size % scale.spatial for size in shape[-3:-1])):
        raise InvalidRequest(
            f"pixels of shape {list(shape)}: this VAE takes [batch, frames, height, width, 3], pictures without "
            f"frames, with a height and a width that are multiples of {scale.spatial}"
        )
    _check_tile(tile, scale.spatial)


def _check_tile(tile: int, spatial: int) -> None:
    if tile and (tile % spatial or tile < SMALLEST_TILE * spatial):
        raise InvalidRequest(
            f"tile {tile}: this VAE takes tiles of multiples of {spatial} pixels, "
            f"{SMALLEST_TILE * spatial} or more, or 0 for none"
        )


def decode(
    kind: VAE, module: Any, latent: Tensor, tick: Tick, rows: Rows | None = None, *, clamp: bool = True
) -> Tensor:
    """Latents ``[B, C, T, H, W]`` to pixels ``[B, T', H', W', 3]``, float32 in 0..1 on the CPU.

    ``[B, C, H, W]`` gives ``[B, H', W', 3]``; the VAE of pictures takes the frames of a video one by one.
    Each part goes straight to its place in the result. With ``rows`` the latent is the own rows, and the result empty
    on all ranks but the first. Without ``clamp`` pixels stay as the VAE gives them, around -1..1.
    """
    single = latent.ndim == 5 and not kind.scale.video
    samples = latent.transpose(1, 2).flatten(0, 1) if single else latent
    frames = samples.shape[2] if samples.ndim == 5 else 1
    writer = _Writer(kind, samples, frames, rows, clamp)
    done = _counted(tick, len(samples) * kind.decode_parts(module, frames))
    for sample in samples:
        kind.decode(module, sample[None].to(module.dtype), writer.write, done)
    pixels = writer.all()
    if rows and rows.axis.index:
        return pixels
    pixels = pixels if samples.ndim == 5 else pixels[:, 0]
    return pixels.unflatten(0, (latent.shape[0], -1)) if single else pixels


def encode(kind: VAE, module: Any, pixels: Tensor, tick: Tick, rows: Rows | None = None) -> Tensor:
    """Pixels ``[B, T, H, W, 3]`` or ``[B, H, W, 3]`` in 0..1 to latents ``[B, C, T', H', W']`` or ``[B, C, H', W']``.

    They are the posterior's mode, in float32. ``T' = 1 + (T - 1) // temporal``; as in ComfyUI, frames beyond the last
    whole group make no latent. The VAE of pictures takes the frames of a video one by one. With ``rows`` the pixels are
    the own rows, and the result empty on all ranks but the first.
    """
    single = pixels.ndim == 5 and not kind.scale.video
    samples = pixels.flatten(0, 1) if single else pixels
    frames = kind.kept_frames(samples.shape[1]) if samples.ndim == 5 else 1
    samples = samples[:, :frames] if samples.ndim == 5 else samples
    done = _counted(tick, len(samples) * kind.encode_parts(module, frames))
    latents = [
        kind.encode(module, sample[None].to(module.dtype).movedim(-1, 1) * 2.0 - 1.0, done) for sample in samples
    ]
    latent = torch.cat(latents).float()
    if rows:
        every = rows.gather(latent, latent.ndim - 2)
        if not every:
            return torch.empty(0)
        latent = torch.cat(every, dim=-2)
    return latent.unflatten(0, (pixels.shape[0], -1)).transpose(1, 2) if single else latent


def _counted(tick: Tick, total: int) -> Callable[[], None]:
    """Call ``tick`` with how often this was called."""
    parts = iter(range(1, total + 1))
    return lambda: tick(next(parts), total)


class _Writer:
    """Puts the decoded parts of ``[N, C, T, H, W]`` or ``[N, C, H, W]``, in order, into ``[N, T', H', W', 3]``.

    With ``rows`` the first rank takes all ranks' rows, and the others have no result.
    """

    def __init__(self, kind: VAE, samples: Tensor, frames: int, rows: Rows | None, clamp: bool) -> None:
        height, width = (size * kind.scale.spatial for size in samples.shape[-2:])
        self._rows, self._clamp, self._frame = rows, clamp, (height, width, 3)
        self._total, self._frames = len(samples) * kind.pixel_frames(frames), 0
        whole = rows.at(height).total if rows else height
        shape = (len(samples), kind.pixel_frames(frames), whole, width, 3)
        self._pixels = torch.empty(0 if rows and rows.axis.index else shape)

    def write(self, part: Tensor) -> None:
        """Take the next frames ``[1, 3, t, H', W']`` in -1..1."""
        frames = part[0].movedim(0, -1)
        if self._frames + len(frames) > self._total or frames.shape[1:] != self._frame:
            raise InvalidRequest(
                f"the VAE gives pixels of shape {list(frames.shape)} where its config.json promises "
                f"{[self._total - self._frames, *self._frame]}: the two do not belong together"
            )
        for i, frame in enumerate(frames, self._frames):
            self._place(i, self._rows.gather(frame, 0) if self._rows else [frame])
        self._frames += len(frames)

    def _place(self, index: int, parts: Sequence[Tensor]) -> None:
        """Put the rows of a frame where they belong, of all ranks; none where there is no result."""
        begin = 0
        for part in parts:
            pixels = part.float()
            place = self._pixels.flatten(0, 1)[index, begin : begin + len(part)]
            place.copy_(((pixels + 1.0) / 2.0).clamp_(0.0, 1.0) if self._clamp else pixels)
            begin += len(part)

    def all(self) -> Tensor:
        """The whole result; nothing on ranks that have none.

        Raises:
            InvalidRequest: there were fewer frames than the VAE's config promises.
        """
        if self._frames < self._total:
            raise InvalidRequest(f"the VAE gave {self._frames} frames where its config.json promises {self._total}")
        return self._pixels
