"""What to say of a layout that does not fit: those nearest to it that would."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import InvalidRequest
from .parallel_layout import AXES, OPTIONS, STALE, ParallelLayout

Works = Callable[[ParallelLayout], bool]
"""Whether a layout passes all checks but that of the number of ranks."""

_BRANCHES = 2
"""What guidance computes in ComfyUI: the positive prompt and the negative one."""

_BEFORE = ("ulysses", "ring", "tensor", "cfg", "data", "pipe")
"""Of layouts that are equally near, those with more on the axes named first go before."""


def check_fits(layout: ParallelLayout, ranks: int, works: Works | None = None) -> None:
    """Refuse a layout that needs more ranks than there are, naming the nearest ones that fit.

    Without ``works``, where model and request are not known, those are named that ask no more of them than this one.

    Raises:
        InvalidRequest: the layout uses more than ``ranks`` ranks.
    """
    if layout.ranks <= ranks:
        return
    near = would_work(layout, ranks, works or (lambda other: _covers(layout, other)))
    raise InvalidRequest(f'layout "{layout}" needs {layout.ranks} ranks and there are {ranks}; {near}')


def would_work(wanted: ParallelLayout, ranks: int, works: Works) -> str:
    """What to say of the layouts nearest to one that was refused."""
    return "would work: " + ", ".join(f'"{layout}"' for layout in nearest(wanted, ranks, works))


def nearest(wanted: ParallelLayout, ranks: int, works: Works, *, count: int = 3) -> list[ParallelLayout]:
    """Of the layouts of at most ``ranks`` ranks that work, the nearest to ``wanted``, the nearest first.

    Far are ranks that are left idle, degrees that differ, and weights that are no longer shared; one rank, which
    always works, is among them.
    """
    fitting = [layout for layout in _layouts(ranks, wanted) if works(layout)]
    return sorted(fitting, key=lambda layout: _distance(layout, wanted, min(wanted.ranks, ranks)))[:count]


def _layouts(ranks: int, wanted: ParallelLayout) -> Iterator[ParallelLayout]:
    """All layouts of at most ``ranks`` ranks, with the options of ``wanted`` where they are of use, and stages of a
    pipeline only if it has them."""
    proposed = tuple(axis for axis in AXES if axis != "pipe" or wanted.pipe > 1)

    def grow(axes: tuple[str, ...], room: int, degrees: dict[str, Any]) -> Iterator[ParallelLayout]:
        if not axes:
            pipe, ring = degrees.get("pipe", 1) > 1, degrees["ring"] > 1
            if pipe and degrees["tensor"] > 1:
                return
            yield ParallelLayout(
                **degrees,
                shard_weights=wanted.shard_weights and not pipe and (ring or degrees["ulysses"] > 1),
                patches=wanted.patches if pipe else OPTIONS["patches"],
                stale=wanted.stale if ring and not pipe else STALE[0],
                warmup=wanted.warmup if pipe or (ring and wanted.stale) else OPTIONS["warmup"],
            )  # without balance: it is for one number of stages or patches
            return
        for degree in range(1, room + 1):
            yield from grow(axes[1:], room // degree, {**degrees, axes[0]: degree})

    return grow(proposed, ranks, {})


def _distance(layout: ParallelLayout, wanted: ParallelLayout, ranks: int) -> tuple[float, ...]:
    idle = 2 * abs(math.log2(ranks / layout.ranks))
    differ = sum(abs(math.log2(layout.degrees[axis] / wanted.degrees[axis])) for axis in AXES)
    unshared = 4 * (layout.shard_weights != wanted.shard_weights)
    return (round(idle + differ + unshared, 6), *(-layout.degrees[axis] for axis in _BEFORE))


def _covers(layout: ParallelLayout, other: ParallelLayout) -> bool:
    """Whether another layout has no more groups that need a part of the batch, of the guidance or of the heads."""
    cfg = min(layout.cfg, _BRANCHES)
    return (
        other.data <= layout.data and other.cfg <= cfg and other.tensor <= layout.tensor and other.pipe <= layout.pipe
    )
