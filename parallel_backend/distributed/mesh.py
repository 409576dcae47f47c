"""The device mesh: a layout's process groups, and this rank's position on each axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..layout.parallel_layout import AXES, ParallelLayout
from ..progress import CONNECTING, PROGRESS

Grid = npt.NDArray[np.int_]
_BOUNDARIES = ("even boundaries", "odd boundaries", "return")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks along one axis of the mesh that include this rank.

    Attributes:
        name: name of the axis.
        ranks: global ranks, in the order of the axis.
        index: this rank's position in ``ranks``.
        group: their process group; None on an axis of one rank, where nothing is ever sent.
        gloo: whether gloo is the group's only backend; it sends GPU tensors through CPU memory.
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
    """Ranks ``0 .. layout.ranks - 1`` as a grid with the axes ``AXES``, the last axis varying fastest.

    Attributes:
        layout: the layout that the mesh was made for.
        serial: distinguishes meshes; the same on all ranks.
        axes: this rank's ranks along each axis, by the axis's name.
        sequence: the ranks that split the tokens of one row: ``ring`` and ``ulysses`` as one axis.
        boundaries: three more groups over the stages of ``pipe``: sends from even stages to the next stage use the
            first, sends from odd stages the second, and the last stage sends to the first stage in the third. NCCL
            runs all sends and receives of one group in the order they were started, in either direction, so a single
            group would serialise them. None without stages.
        weights_axis: the ranks of ``sequence`` with a second group, on which sharded weights are gathered. Work in one
            group runs in order, and weights have to arrive while tokens are exchanged. None if the layout does not
            shard weights.
        behind: the ranks of ``ring`` with a second group, on which keys and values for the next step arrive in the
            background. None unless the layout has ``stale=previous``.
        whole: all ranks of the mesh.
        measured_speeds: relative speed of each rank.
    """

    layout: ParallelLayout
    serial: int
    axes: dict[str, Axis]
    sequence: Axis
    boundaries: tuple[Axis, Axis, Axis] | None
    weights_axis: Axis | None
    behind: Axis | None
    whole: Axis
    measured_speeds: tuple[float, ...]

    def speeds(self, axis: str) -> tuple[float, ...]:
        """Relative speed of each position on an axis of stages or patches.

        These are the layout's ``balance`` if it has one, otherwise the measured speed of the slowest rank there.
        """
        if self.layout.balance:
            return self.layout.balance
        positions = [self.layout.coordinates(rank)[axis] for rank in self.whole.ranks]
        return tuple(
            min(speed for position, speed in zip(positions, self.measured_speeds, strict=True) if position == i)
            for i in range(self.layout.degrees[axis])
        )

    def free(self) -> None:
        """Destroy the process groups, which must not be used afterwards. Collective over the mesh."""
        axes = [*self.axes.values(), self.sequence, *(self.boundaries or ()), self.weights_axis, self.behind]
        # ``sequence`` may be one of the axes, so duplicates are dropped; NCCL needs the same order on all ranks.
        for group in dict.fromkeys(axis.group for axis in (*axes, self.whole) if axis and axis.group):
            dist.destroy_process_group(group)


def create(
    layout: ParallelLayout, *, rank: int, timeout: timedelta, serial: int = 0, speeds: Sequence[float] = ()
) -> DeviceMesh | None:
    """Create the process groups of a layout. Collective over the whole world.

    ``torch.distributed`` requires every rank, idle ones included, to take part in creating every group, in the same
    order.

    Args:
        layout: degrees of the axes.
        rank: this rank.
        timeout: deadline of each collective in these groups.
        serial: see ``DeviceMesh``.
        speeds: relative speed of each rank of the world; all are equal if it is empty.

    Returns:
        The mesh, or None on a rank that the layout leaves idle.
    """
    grid = np.arange(layout.ranks).reshape(tuple(layout.degrees.values()))
    axes: dict[str, Axis] = {}
    for dim, name in enumerate(AXES):
        axes |= _axis_along(name, np.moveaxis(grid, dim, -1), rank, timeout)
    ring = AXES.index("ring")
    ring_ulysses = np.moveaxis(grid, (ring, ring + 1), (-2, -1)).reshape(-1, layout.sequence)
    if layout.ring > 1 and layout.ulysses > 1:
        axes |= _axis_along("sequence", ring_ulysses, rank, timeout)
    if layout.pipe > 1:
        for name in _BOUNDARIES:
            axes |= _axis_along(name, np.moveaxis(grid, AXES.index("pipe"), -1), rank, timeout)
    if layout.shard_weights:
        axes |= _axis_along("weights", ring_ulysses, rank, timeout)
    if layout.stale == "previous":
        axes |= _axis_along("behind", np.moveaxis(grid, ring, -1), rank, timeout)
    whole = _axis("mesh", tuple(range(layout.ranks)), rank, timeout)
    if whole is None:
        return None
    sequence = axes.pop("sequence", axes["ring"] if layout.ring > 1 else axes["ulysses"])
    weights, behind = axes.pop("weights", None), axes.pop("behind", None)
    even, odd, last_to_first = (axes.pop(name, None) for name in _BOUNDARIES)
    return DeviceMesh(
        layout=layout, serial=serial, axes=axes, sequence=sequence, whole=whole, weights_axis=weights, behind=behind,
        boundaries=(even, odd, last_to_first) if even and odd and last_to_first else None,
        measured_speeds=tuple(speeds[: layout.ranks]) or (1.0,) * layout.ranks,
    )  # fmt: skip


def _axis_along(name: str, grid: Grid, rank: int, timeout: timedelta) -> dict[str, Axis]:
    """Create the groups along the grid's last dim; return this rank's axis by its name, nothing on an idle rank."""
    axes = [_axis(name, tuple(map(int, ranks)), rank, timeout) for ranks in grid.reshape(-1, grid.shape[-1])]
    local = [axis for axis in axes if axis]
    return {name: local[0]} if local else {}


def _axis(name: str, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> Axis | None:
    """Create the group of some ranks; None on a rank that is not one of them."""
    with PROGRESS.phase(CONNECTING):
        group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if rank not in ranks:
            return None
        backend = dist.get_backend(group) if group else ""
        if "nccl" in backend:
            _connect(group)
    return Axis(name=name, ranks=ranks, index=ranks.index(rank), group=group, gloo=backend == "gloo")


def _connect(group: dist.ProcessGroup | None) -> None:
    """Make NCCL connect all ranks of a group now instead of at the first use.

    The first use may be an exchange in which a rank without tokens or heads takes no part, and the other ranks would
    wait for it (see ``torch.distributed.batch_isend_irecv``). Returns when they are connected, so that ranks that
    cannot reach each other stay in this phase.
    """
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
