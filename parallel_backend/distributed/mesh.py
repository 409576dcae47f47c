"""The device mesh: one object that owns a layout's process groups and this rank's coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..layout.parallel_layout import AXES, ParallelLayout

Grid = npt.NDArray[np.int_]
_BOUNDARIES = ("even boundaries", "odd boundaries", "back")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A line of ranks that work together; ``index`` is this rank's place on it.

    ``group`` is None on an axis of one rank, where nothing is ever sent. ``gloo`` says that it is gloo's alone, which
    sends from the CPU's memory.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    gloo: bool

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """Ranks ``0 .. layout.ranks - 1`` as a grid with the axes of ``layout.AXES``, the last the fastest.

    Attributes:
        number: tells it from other meshes, alike on all ranks.
        axes: this rank's line along every axis.
        sequence: the ranks that share out the tokens of one row: ``ring`` and ``ulysses`` as one axis.
        boundaries: the stages of a pipeline with groups of their own, in which every second stage sends to the next,
            the others do, and the last one sends to the first: what NCCL sends and receives in one group waits for what
            was begun before, in either direction. None without stages.
        weights: the same ranks with a group of their own, where they share weights: what runs on one group runs one
            after the other, and weights are to arrive while tokens are exchanged. None where they do not.
        behind: likewise the ranks of ``ring``, where keys and values arrive for the next step. None where they do not.
        whole: all ranks of the mesh.
        measured: how fast the ranks are, relative to one another.
    """

    layout: ParallelLayout
    number: int
    axes: dict[str, Axis]
    sequence: Axis
    boundaries: tuple[Axis, Axis, Axis] | None
    weights: Axis | None
    behind: Axis | None
    whole: Axis
    measured: tuple[float, ...]

    def speeds(self, axis: str) -> tuple[float, ...]:
        """How fast the places on an axis of stages or patches are: as the layout says, or as the slowest rank there."""
        if self.layout.balance:
            return self.layout.balance
        places = [self.layout.coordinates(rank)[axis] for rank in self.whole.ranks]
        return tuple(
            min(speed for place, speed in zip(places, self.measured, strict=True) if place == i)
            for i in range(self.layout.degrees[axis])
        )

    def free(self) -> None:
        """Free the groups, which nothing may use any more. Collective over the mesh."""
        # An axis may be the sequence as well; and in one order, which NCCL wants.
        lines = [*self.axes.values(), self.sequence, *(self.boundaries or ()), self.weights, self.behind, self.whole]
        for group in dict.fromkeys(line.group for line in lines if line and line.group):
            dist.destroy_process_group(group)


def create(
    layout: ParallelLayout, *, rank: int, timeout: timedelta, number: int = 0, measured: Sequence[float] = ()
) -> DeviceMesh | None:
    """Make the groups of a layout; None on a rank that the layout leaves idle.

    Collective over the whole world: ``torch.distributed`` wants every rank, idle ones too, at the making of
    every group, in the same order. ``timeout`` is the deadline of each collective in these groups. Without ``measured``
    all ranks count as equally fast.
    """
    grid = np.arange(layout.ranks).reshape(_shape(layout))
    axes: dict[str, Axis] = {}
    for dim, name in enumerate(AXES):
        axes |= _lines(name, np.moveaxis(grid, dim, -1), rank, timeout)
    ring = AXES.index("ring")
    folded = np.moveaxis(grid, (ring, ring + 1), (-2, -1)).reshape(-1, layout.sequence)
    if layout.ring > 1 and layout.ulysses > 1:
        axes |= _lines("sequence", folded, rank, timeout)
    if layout.pipe > 1:
        for name in _BOUNDARIES:
            axes |= _lines(name, np.moveaxis(grid, AXES.index("pipe"), -1), rank, timeout)
    if layout.shard_weights:
        axes |= _lines("weights", folded, rank, timeout)
    if layout.stale == "previous":
        axes |= _lines("behind", np.moveaxis(grid, ring, -1), rank, timeout)
    whole = _line("mesh", tuple(range(layout.ranks)), rank, timeout)
    if whole is None:
        return None
    sequence = axes.pop("sequence", axes["ring"] if layout.ring > 1 else axes["ulysses"])
    weights, behind = axes.pop("weights", None), axes.pop("behind", None)
    even, odd, back = (axes.pop(name, None) for name in _BOUNDARIES)
    return DeviceMesh(
        layout=layout, number=number, axes=axes, sequence=sequence, whole=whole, weights=weights, behind=behind,
        boundaries=(even, odd, back) if even and odd and back else None,
        measured=tuple(measured[: layout.ranks]) or (1.0,) * layout.ranks,
    )  # fmt: skip


def _lines(name: str, grid: Grid, rank: int, timeout: timedelta) -> dict[str, Axis]:
    """The groups along the last dim of the grid; this rank's own by its name."""
    lines = [_line(name, tuple(map(int, ranks)), rank, timeout) for ranks in grid.reshape(-1, grid.shape[-1])]
    return dict.fromkeys([name], next(line for line in lines if line)) if any(lines) else {}


def _line(name: str, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> Axis | None:
    group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
    if rank not in ranks:
        return None
    backend = dist.get_backend(group) if group else ""
    if "nccl" in backend:
        _connect(group)
    return Axis(name=name, ranks=ranks, index=ranks.index(rank), group=group, gloo=backend == "gloo")


def _connect(group: dist.ProcessGroup | None) -> None:
    """Have NCCL connect all ranks of a group now, which it otherwise does at the first use.

    The first use may be an exchange that a rank without tokens or heads takes no part in, while the others would wait
    for it (see ``torch.distributed.batch_isend_irecv``).
    """
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def _shape(layout: ParallelLayout) -> tuple[int, ...]:
    return tuple(layout.degrees.values())
