"""Decode and encode in tiles, shared out over ranks, for what does not fit into memory even in rows.

Each tile is worked on by itself, whole, on one rank; where tiles lie over one another they are blended by ramps, as
ComfyUI's ``tiled_scale`` does. That is approximate: a tile does not see beyond its edges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import collectives
from ..distributed.mesh import Axis
from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES

Dims = tuple[int, int]
"""Of rows and of columns, from the end."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Latents or pixels: where their rows and columns are, and how many make one of the latent."""

    dims: Dims
    scale: int


class Tiles:
    """Tiles of a plane.

    Args:
        plane: height and width of the latent.
        tile: height and width of a tile, in the latent's. A quarter of it lies over the next tile.
    """

    def __init__(self, plane: tuple[int, int], tile: int) -> None:
        self.size = (min(plane[0], tile), min(plane[1], tile))
        self._plane, self._starts = plane, [_starts(length, tile) for length in plane]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first row and column of each tile."""
        return [(row, column) for row in self._starts[0] for column in self._starts[1]]

    def of(self, whole: Tensor, place: tuple[int, int], side: Side) -> Tensor:
        """A tile's part of a tensor, as a view."""
        for dim, start, length in zip(side.dims, place, self.size, strict=True):
            whole = whole.narrow(dim, start * side.scale, length * side.scale)
        return whole

    def scatter(
        self,
        whole: Tensor | None,
        meta: TensorMeta,
        side: Side,
        axis: Axis,
        device: torch.device,
        places: Sequence[Dims],
    ) -> Tensor:
        """This rank's of some tiles, one a rank, of what the first rank has; ``meta`` is that of the whole."""
        shape = list(meta.shape)
        for dim, length in zip(side.dims, self.size, strict=True):
            shape[dim] = length * side.scale
        own = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
        return collectives.scatter([] if whole is None else [self.of(whole, at, side) for at in places], own, axis)

    def empty(self, tile: Tensor, side: Side) -> Tensor:
        """Zeros of the whole's shape, by that of a tile."""
        shape = list(tile.shape)
        for dim, length in zip(side.dims, self._plane, strict=True):
            shape[dim] = length * side.scale
        return torch.zeros(shape)

    def weight(self, place: tuple[int, int], side: Side, ndim: int) -> Tensor:
        """What a tile counts at each of its rows and columns; all tiles of a place count 1."""
        weight = torch.ones(())
        for dim, start, starts, length in zip(side.dims, place, self._starts, self.size, strict=True):
            ramp = _shares(starts, length, side.scale)[starts.index(start)]
            weight = weight * ramp.view(-1, *[1] * (-dim - 1))
        return weight.view(*[1] * (ndim - weight.ndim), *weight.shape)


def _starts(length: int, tile: int) -> list[int]:
    if length <= tile:
        return [0]
    stride = tile - tile // 4
    return [min(i * stride, length - tile) for i in range(-(-(length - tile) // stride) + 1)]


def _shares(starts: Sequence[int], tile: int, scale: int) -> list[Tensor]:
    """By tile of one dim, what it counts at each of its places: less towards an edge that lies over another tile."""
    length, over = tile * scale, max(1, tile // 4 * scale)
    rise = ((torch.arange(length) + 1) / (over + 1)).clamp(max=1.0)
    total = torch.zeros(starts[-1] * scale + length)
    ramps = []
    for start in starts:
        ramp = torch.ones(length)
        ramp = ramp if start == starts[0] else ramp * rise
        ramp = ramp if start == starts[-1] else ramp * rise.flip(0)
        total[start * scale : start * scale + length] += ramp
        ramps.append(ramp)
    return [ramp / total[start * scale : start * scale + length] for start, ramp in zip(starts, ramps, strict=True)]


def run(
    tiles: Tiles,
    take: Callable[[Sequence[Dims]], Tensor],
    side: Side,
    work: Callable[[Tensor], Tensor],
    tick: Callable[[int, int], None],
    axis: Axis,
) -> Tensor:
    """What ``work`` makes of all tiles, blended, on the first rank; nothing on others.

    Args:
        take: gives this rank's of the tiles at some places, one a rank; side: that of what is made of it.
        tick: called with the number of tiles done and of all.
    """
    places = tiles.places
    whole: Tensor | None = None
    for first in range(0, len(places), axis.size):
        at_once = places[first : first + axis.size]
        own = work(take(at_once)).float() if axis.index < len(at_once) else torch.empty(0)
        for place, tile in zip(at_once, _gathered(own, len(at_once), axis), strict=not axis.index):
            whole = tiles.empty(tile, side) if whole is None else whole
            tiles.of(whole, place, side).add_(tile.cpu() * tiles.weight(place, side, tile.ndim))
        tick(first + len(at_once), len(places))
    return torch.empty(0) if whole is None else whole


def _gathered(own: Tensor, count: int, axis: Axis) -> list[Tensor]:
    """The tiles that the first so many ranks have made, on the first rank; nothing on others."""
    sizes = [own.numel() if i < count else 0 for i in range(axis.size)]
    every = collectives.gather(own, sizes, axis)
    return [] if axis.index else [part.view(own.shape) for part in every[:count]]
