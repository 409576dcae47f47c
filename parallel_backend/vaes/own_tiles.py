"""VAEs that work in clips and overlapping tiles of their own, whose blending is part of the result.

A tile of a clip is coded without the others, so one rank computes it alone. What overlaps is faded over linearly, in
the order of the tiles.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import VAE, UnitDone, WriteFrames

LATENT_DIMS, PIXEL_DIMS, REQUEST_DIMS = (2, 3, 4), (2, 3, 4), (1, 2, 3)
"""Dims of frames, rows and columns: of latents, of pixels ``[B, 3, T, H, W]``, of pixels ``[B, T, H, W, 3]``."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Overlapping tiles of the same length along one dim.

    Attributes:
        starts: the first position of each.
        length: the positions of each.
        overlaps: how many positions each tile but the last shares with the next one.
    """

    starts: tuple[int, ...]
    length: int
    overlaps: tuple[int, ...] = ()

    @classmethod
    def over(cls, length: int, *, tile: int, overlap: int, step: int) -> "Spans":
        """Return the fewest tiles that cover ``length`` positions.

        What they cover too much widens the overlaps, a step at a time, the first ones first.

        Args:
            tile: positions of a tile.
            overlap: positions of the narrowest overlap.
            step: a unit of all these numbers.
        """
        if length <= tile:
            return cls(starts=(0,), length=length)
        count = -(-(length - overlap) // (tile - overlap))
        each, more = divmod((count * tile - (count - 1) * overlap - length) // step, count - 1)
        overlaps = tuple(overlap + step * (each + (i < more)) for i in range(count - 1))
        starts = tuple(sum(tile - width for width in overlaps[:i]) for i in range(count))
        return cls(starts=starts, length=tile, overlaps=overlaps)

    @property
    def total(self) -> int:
        """Positions that all tiles cover together."""
        return self.starts[-1] + self.length

    def times(self, up: int, down: int = 1) -> "Spans":
        """Return the same tiles of a dim that has ``up`` positions for each ``down`` of this one."""
        return Spans(
            starts=tuple(start * up // down for start in self.starts),
            length=self.length * up // down,
            overlaps=tuple(width * up // down for width in self.overlaps),
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tile of a clip of a sample.

    Attributes:
        sample: index of the sample.
        first: the clip's first frame.
        frames: its number of frames. The sample's last one is repeated where it is shorter.
        row: the first row.
        column: the first column.
        height: number of rows.
        width: number of columns.
    """

    sample: int
    first: int
    frames: int
    row: int
    column: int
    height: int
    width: int

    def cut(self, whole: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the values of this part, with the dim of samples.

        Args:
            dims: where ``whole`` has frames, rows and columns.
        """
        frames, row, column = dims
        there = min(self.frames, whole.shape[frames] - self.first)
        found = whole[self.sample : self.sample + 1].narrow(frames, self.first, there)
        found = found.narrow(row, self.row, self.height).narrow(column, self.column, self.width)
        if there == self.frames:
            return found
        last = found.narrow(frames, there - 1, 1)
        return torch.cat([found, *[last] * (self.frames - there)], dim=frames)

    def shape(self, whole: Sequence[int], dims: Sequence[int]) -> list[int]:
        """Return the shape of what ``cut`` returns."""
        shape = [1, *whole[1:]]
        for dim, length in zip(dims, (self.frames, self.height, self.width), strict=True):
            shape[dim] = length
        return shape


def fade(before: Tensor, after: Tensor, dim: int) -> None:
    """Let the first positions of ``after`` come in, linearly, over the last ones of ``before``. Changes ``after``."""
    count = min(before.shape[dim], after.shape[dim])
    rise = torch.arange(count, device=after.device, dtype=after.dtype) / count
    rise = rise.view([count if i == dim % after.ndim else 1 for i in range(after.ndim)])
    head = after.narrow(dim, 0, count)
    head.copy_(before.narrow(dim, before.shape[dim] - count, count) * (1 - rise) + head * rise)


class Mosaic:
    """Joins tiles into planes: row by row, each from the left.

    A tile fades in over the one above it, and then over the one at its left; both as they were before they were faded
    themselves.
    """

    def __init__(self, rows: Spans, columns: Spans) -> None:
        self._rows, self._columns, self._count = rows, columns, 0
        self._above: dict[int, Tensor] = {}
        self._left: Tensor | None = None
        self._plane = torch.empty(0)

    def add(self, tile: Tensor) -> Tensor | None:
        """Take the next tile, ``[..., height, width]``, and change it. Return the plane after its last tile."""
        row, column = divmod(self._count, len(self._columns.starts))
        above, left = self._above.pop(column, None), self._left
        for overlap in self._rows.overlaps[row : row + 1]:
            self._above[column] = tile[..., -overlap:, :].clone()
        self._left = None
        for overlap in self._columns.overlaps[column : column + 1]:
            self._left = tile[..., -overlap:].clone()
        if above is not None:
            fade(above, tile, -2)
        if left is not None:
            fade(left, tile, -1)
        return self._placed(tile, self._rows.starts[row], self._columns.starts[column])

    def _placed(self, tile: Tensor, row: int, column: int) -> Tensor | None:
        """Write a tile over those before it; return the plane after its last tile."""
        if self._count == 0:
            self._plane = tile.new_empty(*tile.shape[:-2], self._rows.total, self._columns.total)
        self._plane.narrow(-2, row, tile.shape[-2]).narrow(-1, column, tile.shape[-1]).copy_(tile)
        self._count += 1
        if self._count < len(self._rows.starts) * len(self._columns.starts):
            return None
        plane, self._plane, self._count = self._plane, torch.empty(0), 0
        return plane


class Joiner:
    """Joins the results of a sample's parts, which it gets in order."""

    def __init__(self, rows: Spans, columns: Spans) -> None:
        self._mosaic = Mosaic(rows, columns)

    def add(self, tile: Tensor) -> None:
        """Take the next part's result, which it may change."""
        clip = self._mosaic.add(tile)
        if clip is not None:
            self._join(clip)

    @abstractmethod
    def _join(self, clip: Tensor) -> None:
        """Take the next clip, ``[1, C, t, H, W]``."""

    def result(self) -> Tensor:
        """Return the latent of a sample that was encoded, in float32."""
        raise NotImplementedError


class TiledVAE(VAE):
    """A VAE that works in clips and tiles of its own.

    Attributes:
        own_overlap: the narrowest overlap of two tiles, in pixels.
    """

    own_overlap: ClassVar[int]
    writes_each_unit = True

    @abstractmethod
    def clips(self, frames: int, *, encode: bool) -> tuple[tuple[int, int], ...]:
        """Return the first frame and the number of frames of each clip.

        Args:
            frames: of the video to encode, or of the latent to decode.
        """

    @abstractmethod
    def code_tile(self, module: Any, tile: Tensor, *, encode: bool) -> Tensor:
        """Encode a tile of pixels ``[1, 3, t, h, w]`` in -1..1, or decode one of a latent ``[1, C, t, h, w]``."""

    @abstractmethod
    def tile_frames(self, frames: int, *, encode: bool) -> int:
        """Return how many frames ``code_tile`` gives for a tile of so many frames."""

    @abstractmethod
    def joiner(self, module: Any, shape: Sequence[int], write: WriteFrames | None) -> Joiner:
        """Return what joins the parts of a sample.

        Args:
            shape: frames, rows and columns of the sample.
            write: takes the frames of a latent that is decoded; None if pixels are encoded.
        """

    def spans(self, length: int, *, encode: bool) -> Spans:
        """Return the tiles along rows or columns: in pixels of what is encoded, in latent rows of what is decoded."""
        spatial = self.scale.spatial
        pixels = length if encode else length * spatial
        found = Spans.over(pixels, tile=self.own_tile, overlap=self.own_overlap, step=spatial)
        return found if encode else found.times(1, spatial)

    def parts(self, shape: Sequence[int], dims: Sequence[int], *, encode: bool) -> tuple[Part, ...]:
        """Return all parts of a tensor of samples, in order.

        Args:
            dims: where it has frames, rows and columns.
        """
        frames, height, width = (shape[dim] for dim in dims)
        rows, columns = (self.spans(length, encode=encode) for length in (height, width))
        return tuple(
            Part(
                sample=sample, first=first, frames=count, row=row, column=column, height=rows.length,
                width=columns.length,
            )
            for sample in range(shape[0])
            for first, count in self.clips(frames, encode=encode)
            for row in rows.starts
            for column in columns.starts
        )  # fmt: skip

    def result_shape(self, part: Part, *, encode: bool) -> tuple[int, ...]:
        """Return the shape of what ``code_tile`` gives for a part."""
        spatial, frames = self.scale.spatial, self.tile_frames(part.frames, encode=encode)
        if encode:
            return (1, self.scale.channels, frames, part.height // spatial, part.width // spatial)
        return (1, 3, frames, part.height * spatial, part.width * spatial)

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        """Decode one latent ``[1, C, T, H, W]``, clip by clip."""
        self._code(module, latent, self.joiner(module, latent.shape[2:], write), unit_done, encode=False)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        """Encode one video ``[1, 3, T, H, W]`` in -1..1. Returns float32."""
        joiner = self.joiner(module, pixels.shape[2:], None)
        self._code(module, pixels, joiner, unit_done, encode=True)
        return joiner.result()

    def _code(self, module: Any, whole: Tensor, joiner: Joiner, unit_done: UnitDone, *, encode: bool) -> None:
        dims = PIXEL_DIMS if encode else LATENT_DIMS
        for part in self.parts(whole.shape, dims, encode=encode):
            joiner.add(self.code_tile(module, part.cut(whole, dims), encode=encode))
            unit_done()

    def decode_progress_units(self, module: Any, frames: int) -> int:
        """See ``VAE``; a unit is a tile of a video of one tile a frame. ``parts`` counts those of other sizes."""
        return len(self.clips(frames, encode=False))

    def encode_progress_units(self, module: Any, frames: int) -> int:
        return len(self.clips(frames, encode=True))
