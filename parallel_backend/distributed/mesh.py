"""The mesh of ranks: a layout's process groups, and this rank's position on each axis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ..layout.parallel_layout import AXES, ParallelLayout
from ..layout.split import Split
from .groups import GroupKey

Grid = npt.NDArray[np.int_]
GroupOf = Callable[[GroupKey], dist.ProcessGroup | None]
"""Returns a group; None on a rank that is not in it."""
_BOUNDARIES = ("even boundaries", "odd boundaries", "return")
_BESIDE = (*_BOUNDARIES, "weights", "behind")
"""Axes with a group of their own, because what they carry moves while other work is under way."""
_WHOLE_TAG = 1
"""Keeps stop flags, which rank 0 sends ahead to all ranks of the mesh, apart from what it sends over other axes."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks along one axis of the mesh that include this rank.

    Attributes:
        name: name of the axis.
        ranks: global ranks, in the order of the axis.
        index: this rank's position in ``ranks``.
        group: their process group, which other axes over these ranks share; None on an axis of one rank, where nothing
            is ever sent.
        gloo: whether gloo is the group's only backend; it sends GPU tensors through CPU memory.
        tag: gloo matches sends with receives of the same tag only.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    gloo: bool
    tag: int = 0

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """Ranks ``0 .. layout.ranks - 1`` as a grid with the axes ``AXES``, the last axis varying fastest.

    Attributes:
        layout: the layout that the mesh was made for, balanced by measured speeds if it adapts to them.
        serial: distinguishes meshes; the same on all ranks.
        axes: this rank's ranks along each axis, by the axis's name.
        sequence: the ranks that split the tokens of one row: ``ring``, ``ulysses`` and ``dsp`` as one axis.
        pipe_links: the stages of ``pipe`` with more groups: sends from even stages to the next stage use the first,
            sends from odd stages the second, and the last stage sends to the first stage in the third. NCCL runs all
            sends and receives of one group in the order they were started, in either direction, so a single group
            would serialise them. None without stages.
        weights_axis: the ranks of ``sequence`` with a second group, on which sharded weights are gathered. Work in one
            group runs in order, and weights have to arrive while tokens are exchanged. None if the layout does not
            shard weights.
        ring_async: the ranks of ``ring`` with a second group, on which keys and values for the next step arrive in the
            background. None unless the layout has ``stale=previous``.
        all_ranks: all ranks of the mesh.
    """

    layout: ParallelLayout
    serial: int
    axes: dict[str, Axis]
    sequence: Axis
    pipe_links: tuple[Axis, Axis, Axis] | None
    weights_axis: Axis | None
    ring_async: Axis | None
    all_ranks: Axis

    @property
    def split(self) -> Split:
        """How the ranks share the work."""
        return Split.of(self.layout)


def groups_of(layout: ParallelLayout) -> tuple[GroupKey, ...]:
    """Return the process groups of a layout, each once, in the order of their creation."""
    keys = [_key(name, ranks) for name, groups in _ranks_of(layout).items() for ranks in groups if len(ranks) > 1]
    return tuple(dict.fromkeys(keys))


def create(
    layout: ParallelLayout, group_of: GroupOf, *, rank: int, serial: int = 0, speeds: Sequence[float] = ()
) -> RankMesh | None:
    """Return the mesh of a layout.

    Args:
        layout: degrees of the axes.
        group_of: returns the groups of ``groups_of``.
        rank: this rank.
        serial: see ``RankMesh``.
        speeds: relative speed of each rank of the world, for a layout that adapts to them; empty if all are
            equal.

    Returns:
        The mesh, or None on a rank that the layout leaves idle.
    """
    if rank >= layout.ranks:
        return None
    local = [(name, ranks) for name, rows in _ranks_of(layout).items() for ranks in rows if rank in ranks]
    axes = {name: _axis(name, ranks, rank, group_of) for name, ranks in local}
    whole, weights, behind = axes.pop("whole"), axes.pop("weights", None), axes.pop("behind", None)
    several = next((name for name in ("ring", "dsp") if layout.degrees[name] > 1), "ulysses")
    sequence = axes.pop("sequence", axes[several])
    even, odd, last_to_first = (axes.pop(name, None) for name in _BOUNDARIES)
    return RankMesh(
        layout=layout.at(speeds), serial=serial, axes=axes, sequence=sequence, all_ranks=whole, weights_axis=weights,
        ring_async=behind, pipe_links=(even, odd, last_to_first) if even and odd and last_to_first else None,
    )  # fmt: skip


def alone() -> RankMesh:
    """Return the mesh of one rank."""
    mesh = create(ParallelLayout(), lambda _: None, rank=0)
    assert mesh is not None
    return mesh


def _ranks_of(layout: ParallelLayout) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of each group along each axis, by the axis's name."""
    grid = np.arange(layout.ranks).reshape(tuple(layout.degrees.values()))
    groups = {name: _rows(np.moveaxis(grid, dim, -1)) for dim, name in enumerate(AXES)}
    ring = AXES.index("ring")
    sequences = _rows(np.moveaxis(grid, (ring, ring + 1, ring + 2), (-3, -2, -1)).reshape(-1, layout.sequence))
    if layout.ring > 1 and layout.ulysses > 1:
        groups["sequence"] = sequences
    if layout.pipe > 1:
        groups |= dict.fromkeys(_BOUNDARIES, groups["pipe"])
    if layout.shard_weights:
        groups["weights"] = sequences
    if layout.stale == "previous":
        groups["behind"] = groups["ring"]
    return groups | {"whole": [tuple(range(layout.ranks))]}


def _rows(grid: Grid) -> list[tuple[int, ...]]:
    """Return the ranks along a grid's last dim."""
    return [tuple(map(int, ranks)) for ranks in grid.reshape(-1, grid.shape[-1])]


def _key(name: str, ranks: tuple[int, ...]) -> GroupKey:
    """Return the group of an axis. Most axes share one, since their work runs in one order on every rank."""
    # Two stages have one boundary. All that stages send goes over their boundaries, so they need no group besides.
    if name == "pipe" or (name == _BOUNDARIES[1] and len(ranks) == 2):
        name = _BOUNDARIES[0]
    return GroupKey(ranks=ranks, purpose=name if name in _BESIDE else "", waits=name in _BOUNDARIES)


def _axis(name: str, ranks: tuple[int, ...], rank: int, group_of: GroupOf) -> Axis:
    group = group_of(_key(name, ranks)) if len(ranks) > 1 else None
    gloo = group is not None and dist.get_backend(group) == "gloo"
    tag = _WHOLE_TAG if name == "whole" else 0
    return Axis(name=name, ranks=ranks, index=ranks.index(rank), group=group, gloo=gloo, tag=tag)
