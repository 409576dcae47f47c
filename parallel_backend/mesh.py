"""The device mesh: one object that owns a layout's process groups and this rank's coordinates."""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from .layout import AXES, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A line of ranks that work together; ``index`` is this rank's place on it.

    ``group`` is None on an axis of one rank, where nothing is ever sent.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """Ranks ``0 .. layout.ranks - 1`` as a grid with the axes of ``layout.AXES``, the last the fastest.

    ``axes`` holds this rank's line along every axis, ``whole`` all ranks of the mesh.
    """

    layout: ParallelLayout
    axes: dict[str, Axis]
    whole: Axis

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis."""
        place = np.unravel_index(rank, _shape(self.layout))
        return {axis: int(index) for axis, index in zip(AXES, place, strict=True)}


def create(layout: ParallelLayout, *, rank: int, timeout: timedelta) -> DeviceMesh | None:
    """Make the groups of a layout; None on a rank that the layout leaves idle.

    Collective over the whole world: ``torch.distributed`` wants every rank, idle ones too, at the making of
    every group, in the same order. ``timeout`` is the deadline of each collective in these groups.
    """
    grid = np.arange(layout.ranks).reshape(_shape(layout))
    axes: dict[str, Axis] = {}
    for dim, name in enumerate(AXES):
        for line in np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim]):
            axis = _line(name, tuple(int(r) for r in line), rank, timeout)
            if axis:
                axes[name] = axis
    whole = _line("mesh", tuple(range(layout.ranks)), rank, timeout)
    return DeviceMesh(layout=layout, axes=axes, whole=whole) if whole else None


def _line(name: str, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> Axis | None:
    group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
    if rank not in ranks:
        return None
    return Axis(name=name, ranks=ranks, index=ranks.index(rank), group=group)


def _shape(layout: ParallelLayout) -> tuple[int, ...]:
    return tuple(getattr(layout, axis) for axis in AXES)
