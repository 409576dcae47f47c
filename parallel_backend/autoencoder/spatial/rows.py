"""How tensors are split by rows, and how ranks exchange rows.

A tensor is ``[..., rows, columns]``. Rank 0 holds the first rows of the latent, of every feature map and of the pixels,
rank 1 the next ones, and so on. Each of these heights is a whole multiple of the latent's height, so multiplying the
latent's partition by that factor gives the partition of every tensor. For example, 7 latent rows on 3 ranks are split
3, 2, 2, and the 56 rows of pixels 24, 16, 16. Heights need not be divisible by the number of ranks.

``RowSplit`` says which rows a rank holds. ``Halo`` fetches the rows just above and just below them from other ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed import collectives
from ...distributed.collectives import concat, start_exchange, wait_all
from ...distributed.mesh import Axis
from ...layout.partition import Partition
from ...protocol.frames import TensorMeta
from ...protocol.tensors import DTYPES

ROW_DIM = -2
"""The dim of rows."""

HaloRows = tuple[Tensor, Tensor]
"""Rows of other ranks: those above this rank's block and those below it. Empty at the image's own borders."""


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Which rows this rank and the other ranks hold.

    Attributes:
        axis: the ranks, from the top rows to the bottom rows.
        latent: the latent's rows by rank. Every rank has at least one.
    """

    axis: Axis
    latent: Partition

    def from_local(self, size: int) -> Partition:
        """Return the partition of rows, or of anything proportional to rows, in which this rank's share is ``size``."""
        local_latent = self.latent.sizes[self.axis.index]
        return Partition(tuple(rows * size // local_latent for rows in self.latent.sizes))

    def from_total(self, size: int) -> Partition:
        """Return the partition of ``size`` rows in total."""
        return scale_partition(self.latent, size)

    def scatter(self, whole: Tensor | None, meta: TensorMeta, dim: int, device: torch.device) -> Tensor:
        """Send each rank its rows of a tensor that rank 0 has, and return this rank's rows.

        Args:
            whole: the tensor on rank 0; None on other ranks.
            meta: its shape and dtype.
            dim: its dim of rows, counted from the end.
            device: where the rows go.
        """
        partition = self.from_total(meta.shape[dim])
        shape = list(meta.shape)
        shape[dim] = partition.sizes[self.axis.index]
        local = torch.empty(shape, dtype=DTYPES[meta.dtype], device=device)
        blocks = [] if whole is None else torch.split(whole, list(partition.sizes), dim)
        return collectives.scatter(blocks, local, self.axis)

    def gather(self, local: Tensor, dim: int) -> list[Tensor]:
        """Return every rank's rows, from the top down, on rank 0; an empty list on other ranks."""
        before, after = local.shape[:dim], local.shape[dim:][1:]
        shapes = [(*before, size, *after) for size in self.from_local(local.shape[dim]).sizes]
        flat = collectives.gather(local, [math.prod(shape) for shape in shapes], self.axis)
        return [] if self.axis.index else [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


class Halo:
    """An exchange of the rows next to each rank's block. It starts when this is created.

    A halo may come from several ranks where a neighbour holds fewer rows than are wanted.

    Args:
        rows: who holds which rows.
        tensors: tensors ``[..., rows, columns]`` with this rank's rows, all of the same height.
        above: how many rows above this rank's block are wanted. There are fewer near the image's top.
        below: how many rows below this rank's block are wanted. There are fewer near the image's bottom.
    """

    def __init__(self, rows: RowSplit, tensors: Sequence[Tensor], above: int, below: int) -> None:
        partition, place = rows.from_local(tensors[0].shape[ROW_DIM]), rows.axis.index
        ranks, begin = range(rows.axis.size), partition.offsets[place]
        outgoing = [
            [
                tensor.narrow(ROW_DIM, first - begin, count).contiguous()
                for first, count in halo_ranges(partition, place, rank, above, below) for tensor in tensors if count
            ]
            for rank in ranks
        ]  # fmt: skip
        self._place = place
        # By rank, then by side (above, below), then by tensor.
        self._incoming = [
            [
                [tensor.new_empty(*tensor.shape[:ROW_DIM], count, tensor.shape[-1]) for tensor in tensors]
                for _, count in halo_ranges(partition, rank, place, above, below)
            ]
            for rank in ranks
        ]
        flat = [[part for side in sides for part in side] for sides in self._incoming]
        self._works = start_exchange(outgoing, flat, rows.axis)

    def wait(self) -> list[HaloRows]:
        """Wait for the rows and return them, one pair per tensor."""
        wait_all(self._works)
        ranks_above, ranks_below = self._incoming[: self._place + 1], self._incoming[self._place :]
        above = zip(*(sides[0] for sides in ranks_above), strict=True)
        below = zip(*(sides[1] for sides in ranks_below), strict=True)
        return [(concat(a, ROW_DIM), concat(b, ROW_DIM)) for a, b in zip(above, below, strict=True)]


def scale_partition(latent: Partition, height: int) -> Partition:
    """Return the partition of ``height`` rows in total, in the proportions of the latent's rows."""
    return Partition(tuple(size * height // latent.total for size in latent.sizes))


def halo_ranges(partition: Partition, owner: int, reader: int, above: int, below: int) -> Iterator[tuple[int, int]]:
    """Yield which of the owner's rows are in the reader's halo, as (first row, count): first above, then below."""
    owner_begin, owner_end = partition.offsets[owner], partition.offsets[owner] + partition.sizes[owner]
    begin, end = partition.offsets[reader], partition.offsets[reader] + partition.sizes[reader]
    for low, high in ((begin - above, begin), (end, end + below)):
        low, high = max(low, owner_begin), min(high, owner_end)
        yield low, max(0, high - low)
