"""Tiled decode and encode, with the tiles shared out over ranks, for what exceeds memory even when split by rows.

One rank computes a whole tile, without the others. Where tiles overlap they are blended with linear ramps, as in
ComfyUI's ``tiled_scale``. The result is approximate, since a tile does not see beyond its edges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import collectives
from ..distributed.mesh import Axis
from ..protocol.frames import TensorMeta
from ..protocol.tensors import DTYPES

RowColumn = tuple[int, int]
"""One number for the rows and one for the columns."""


@dataclass(frozen=True, kw_only=True)
class TileSpace:
    """Where a tensor of latents or pixels has its rows and columns, and how many there are per latent row or column.

    Attributes:
        dims: the dims of rows and of columns, counted from the end.
        scale: rows per latent row, and columns per latent column: 1 for latents.
    """

    dims: RowColumn
    scale: int


class Tiles:
    """Overlapping tiles that cover the rows and columns of a latent, and of the pixels that belong to it.

    Args:
        plane: height and width of the latent.
        tile: height and width of a tile, in rows and columns of the latent. A quarter of it overlaps the next tile.
    """

    def __init__(self, plane: tuple[int, int], tile: int) -> None:
        self.size = (min(plane[0], tile), min(plane[1], tile))
        self._plane, self._starts = plane, [_starts(length, tile) for length in plane]

    @property
    def places(self) -> list[RowColumn]:
        """The first latent row and column of each tile."""
        return [(row, column) for row in self._starts[0] for column in self._starts[1]]

    def crop(self, whole: Tensor, place: RowColumn, side: TileSpace) -> Tensor:
        """Return a view of a tensor's values in the tile at ``place``."""
        for dim, start, length in zip(side.dims, place, self.size, strict=True):
            whole = whole.narrow(dim, start * side.scale, length * side.scale)
        return whole

    def scatter(
        self,
        whole: Tensor | None,
        meta: TensorMeta,
        side: TileSpace,
        axis: Axis,
        device: torch.device,
        places: Sequence[RowColumn],
    ) -> Tensor:
        """Send one tile to each rank and return this rank's tile.

        Args:
            whole: the tensor to cut, on rank 0; None on other ranks.
            meta: the shape and dtype of ``whole``.
            places: the tiles by rank. Ranks without a tile must not call this.
        """
        shape = list(meta.shape)
        for dim, length in zip(side.dims, self.size, strict=True):
            shape[dim] = length * side.scale
        local_tile = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
        parts = [] if whole is None else [self.crop(whole, place, side) for place in places]
        return collectives.scatter(parts, local_tile, axis)

    def zeros(self, tile: Tensor, side: TileSpace) -> Tensor:
        """Return zeros of the shape of the whole result, given one tile of it."""
        shape = list(tile.shape)
        for dim, length in zip(side.dims, self._plane, strict=True):
            shape[dim] = length * side.scale
        return torch.zeros(shape)

    def weight(self, place: RowColumn, side: TileSpace, ndim: int) -> Tensor:
        """Return the blending weights of a tile, to multiply a tile of ``ndim`` dims by.

        At every row and column the weights of all tiles sum to 1.
        """
        weight = torch.ones(())
        for dim, start, starts, length in zip(side.dims, place, self._starts, self.size, strict=True):
            ramp = _ramps(starts, length, side.scale)[starts.index(start)]
            weight = weight * ramp.view(-1, *[1] * (-dim - 1))
        return weight.view(*[1] * (ndim - weight.ndim), *weight.shape)


def _starts(length: int, tile: int) -> list[int]:
    """Return the starts of the tiles along one dim. The last tile ends where the dim ends."""
    if length <= tile:
        return [0]
    stride = tile - tile // 4
    return [min(i * stride, length - tile) for i in range(-(-(length - tile) // stride) + 1)]


def _ramps(starts: Sequence[int], tile: int, scale: int) -> list[Tensor]:
    """Return the weights of each tile along one dim. They fall towards an edge that overlaps another tile."""
    length, overlap = tile * scale, max(1, tile // 4 * scale)
    rise = ((torch.arange(length) + 1) / (overlap + 1)).clamp(max=1.0)
    total = torch.zeros(starts[-1] * scale + length)
    ramps = []
    for start in starts:
        ramp = torch.ones(length)
        ramp = ramp if start == starts[0] else ramp * rise
        ramp = ramp if start == starts[-1] else ramp * rise.flip(0)
        total[start * scale : start * scale + length] += ramp
        ramps.append(ramp)
    return [ramp / total[start * scale : start * scale + length] for start, ramp in zip(starts, ramps, strict=True)]


def process_tiles(
    tiles: Tiles,
    take: Callable[[Sequence[RowColumn]], Tensor],
    side: TileSpace,
    work: Callable[[Tensor], Tensor],
    on_progress: Callable[[int, int], None],
    axis: Axis,
) -> Tensor:
    """Process all tiles, one per rank at a time, and blend the results.

    Args:
        take: returns this rank's input tile, given the places of one tile per rank.
        side: where a result has its rows and columns.
        on_progress: called with the number of finished tiles and of all tiles.

    Returns:
        The blended result on rank 0, an empty tensor on other ranks.
    """
    places = tiles.places
    blended: Tensor | None = None
    for first in range(0, len(places), axis.size):
        round_places = places[first : first + axis.size]
        local_tile = work(take(round_places)).float() if axis.index < len(round_places) else torch.empty(0)
        for place, tile in zip(round_places, _gather(local_tile, len(round_places), axis), strict=not axis.index):
            blended = tiles.zeros(tile, side) if blended is None else blended
            tiles.crop(blended, place, side).add_(tile.cpu() * tiles.weight(place, side, tile.ndim))
        on_progress(first + len(round_places), len(places))
    return torch.empty(0) if blended is None else blended


def _gather(local_tile: Tensor, count: int, axis: Axis) -> list[Tensor]:
    """Return the tiles of the first ``count`` ranks on rank 0, an empty list on other ranks."""
    sizes = [local_tile.numel() if i < count else 0 for i in range(axis.size)]
    flat = collectives.gather(local_tile, sizes, axis)
    return [] if axis.index else [part.view(local_tile.shape) for part in flat[:count]]
