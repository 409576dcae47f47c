"""Planes cut by rows: each rank holds some rows of every picture, feature map and latent, at every level alike."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed import collectives
from ...distributed.collectives import join, start, wait
from ...distributed.mesh import Axis
from ...layout.partition import Partition
from ...protocol.frames import TensorMeta
from ...protocol.tensors import DTYPES

ROWS = -2
"""The dim of rows."""

Edges = tuple[Tensor, Tensor]
"""Rows of other ranks, those above one's own and those below; none at the picture's own borders."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows a rank has. ``latent`` are those of the latent by rank, none of them without any.

    Every level of a VAE is a whole number of times as high as the next, so that its cut is the latent's, scaled.
    """

    axis: Axis
    latent: Partition

    def at(self, height: int) -> Partition:
        """The cut of a plane of which this rank has ``height`` rows."""
        own = self.latent.sizes[self.axis.index]
        return Partition(tuple(size * height // own for size in self.latent.sizes))

    def of(self, height: int) -> Partition:
        """The cut of a plane that has ``height`` rows in all."""
        return scaled(self.latent, height)

    def scatter(self, whole: Tensor | None, meta: TensorMeta, dim: int, device: torch.device) -> Tensor:
        """The own rows of a tensor that the first rank has. ``dim`` is counted from the end."""
        cut, place = self.of(meta.shape[dim]), self.axis.index
        shape = list(meta.shape)
        shape[dim] = cut.sizes[place]
        own = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
        return collectives.scatter([] if whole is None else torch.split(whole, list(cut.sizes), dim), own, self.axis)

    def gather(self, own: Tensor, dim: int) -> list[Tensor]:
        """Every rank's rows, in order, on the first rank; nothing on others."""
        before, after = own.shape[:dim], own.shape[dim:][1:]
        shapes = [(*before, size, *after) for size in self.at(own.shape[dim]).sizes]
        flat = collectives.gather(own, [math.prod(shape) for shape in shapes], self.axis)
        return [] if self.axis.index else [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


class Halo:
    """The rows next to one's own, on their way from the ranks that have them.

    Args:
        planes: of one height, ``[..., rows, columns]``.
        above, below: how many rows are wanted, of which there are fewer at the borders.
    """

    def __init__(self, rows: Rows, planes: Sequence[Tensor], above: int, below: int) -> None:
        cut, place, ranks = rows.at(planes[0].shape[ROWS]), rows.axis.index, range(rows.axis.size)
        begin = cut.offsets[place]
        leaving = [
            [
                plane.narrow(ROWS, first - begin, count).contiguous()
                for first, count in shared(cut, place, rank, above, below) for plane in planes if count
            ]
            for rank in ranks
        ]  # fmt: skip
        self._place = place
        self._arriving = [
            [
                [plane.new_empty(*plane.shape[:ROWS], count, plane.shape[-1]) for plane in planes]
                for _, count in shared(cut, rank, place, above, below)
            ]
            for rank in ranks
        ]
        flat = [[part for side in sides for part in side] for sides in self._arriving]
        self._works = start(leaving, flat, rows.axis)

    def wait(self) -> list[Edges]:
        """By plane, once they are here."""
        wait(self._works)
        before, after = self._arriving[: self._place + 1], self._arriving[self._place :]
        above = zip(*(sides[0] for sides in before), strict=True)
        below = zip(*(sides[1] for sides in after), strict=True)
        return [(join(a, ROWS), join(b, ROWS)) for a, b in zip(above, below, strict=True)]


def scaled(latent: Partition, height: int) -> Partition:
    """The cut of a plane that has ``height`` rows in all, as the latent is cut."""
    return Partition(tuple(size * height // latent.total for size in latent.sizes))


def shared(cut: Partition, owner: int, reader: int, above: int, below: int) -> Iterator[tuple[int, int]]:
    """Which of the owner's rows another rank reads, above its own and below them: the first one and how many."""
    first, last = cut.offsets[owner], cut.offsets[owner] + cut.sizes[owner]
    begin, end = cut.offsets[reader], cut.offsets[reader] + cut.sizes[reader]
    for low, high in ((begin - above, begin), (end, end + below)):
        low, high = max(low, first), min(high, last)
        yield low, max(0, high - low)
