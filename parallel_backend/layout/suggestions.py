"""Suggestions for a layout that does not fit: the nearest layouts that would work."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import InvalidRequest
from .parallel_layout import AXES, OPTIONS, STALE, ParallelLayout

Works = Callable[[ParallelLayout], bool]
"""Whether a layout passes all checks other than the number of ranks."""

_BRANCHES = 2
"""Branches that guidance computes in ComfyUI: the positive and the negative prompt."""

_PREFERENCE = ("ulysses", "dsp", "ring", "tensor", "cfg", "data", "pipe")
"""Among equally near layouts, the one with the higher degree on the earliest of these axes comes first."""


def check_fits(layout: ParallelLayout, ranks: int, works: Works | None = None) -> None:
    """Refuse a layout that needs more ranks than there are, and name the nearest layouts that fit.

    Args:
        works: whether a layout works for the model and the request. If they are unknown (None), only layouts are named
            that demand no more of them than ``layout`` does.

    Raises:
        InvalidRequest: the layout uses more than ``ranks`` ranks.
    """
    if layout.ranks <= ranks:
        return
    near = suggestion(layout, ranks, works or (lambda other: _covers(layout, other)))
    raise InvalidRequest(f'layout "{layout}" needs {layout.ranks} ranks and there are {ranks}; {near}')


def suggestion(wanted: ParallelLayout, ranks: int, works: Works) -> str:
    """Return a text with the layouts nearest to a refused one."""
    return "would work: " + ", ".join(f'"{layout}"' for layout in nearest(wanted, ranks, works))


def fitting(wanted: ParallelLayout, ranks: int) -> ParallelLayout:
    """Return the layout itself if it fits on ``ranks`` ranks, otherwise the nearest that demands no more of the model.

    It splits the weights if the wanted one does, as far as there are ranks to.
    """
    if wanted.ranks <= ranks:
        return wanted

    def works(other: ParallelLayout) -> bool:
        return _covers(wanted, other) and (ranks == 1 or other.splits_weights == wanted.splits_weights)

    return nearest(wanted, ranks, works)[0]


def nearest(wanted: ParallelLayout, ranks: int, works: Works, *, count: int = 3) -> list[ParallelLayout]:
    """Return the ``count`` layouts nearest to ``wanted`` that work with at most ``ranks`` ranks, nearest first.

    The distance grows with the number of idle ranks, with the differences between degrees, and if ``shard_weights``
    differs. There is always at least one: a single rank always works.
    """
    fitting = [layout for layout in _layouts(ranks, wanted) if works(layout)]
    return sorted(fitting, key=lambda layout: _distance(layout, wanted, min(wanted.ranks, ranks)))[:count]


def _layouts(ranks: int, wanted: ParallelLayout) -> Iterator[ParallelLayout]:
    """Yield all layouts of at most ``ranks`` ranks.

    They have the options of ``wanted`` where these apply, and use ``pipe`` only if ``wanted`` does.
    """
    all_axes = tuple(axis for axis in AXES if axis != "pipe" or wanted.pipe > 1)

    def grow(axes: tuple[str, ...], room: int, degrees: dict[str, Any]) -> Iterator[ParallelLayout]:
        """Yield the layouts with these ``degrees`` and all degrees of ``axes`` that ``room`` ranks allow."""
        if not axes:
            pipe, ring, tensor = (degrees.get(axis, 1) > 1 for axis in ("pipe", "ring", "tensor"))
            whole_frames = degrees["dsp"] > 1
            if (pipe or whole_frames) and tensor:
                return
            if whole_frames and (pipe or ring or degrees["ulysses"] > 1):
                return
            yield ParallelLayout(
                **degrees,
                shard_weights=wanted.shard_weights and not pipe and (ring or whole_frames or degrees["ulysses"] > 1),
                patches=wanted.patches if pipe else OPTIONS["patches"],
                stale=wanted.stale if ring and not pipe else STALE[0],
                warmup=wanted.warmup if pipe or (ring and wanted.stale) else OPTIONS["warmup"],
            )  # no balance: it fits only one number of stages or patches
            return
        for degree in range(1, room + 1):
            yield from grow(axes[1:], room // degree, {**degrees, axes[0]: degree})

    return grow(all_axes, ranks, {})


def _distance(layout: ParallelLayout, wanted: ParallelLayout, ranks: int) -> tuple[float, ...]:
    idle = 2 * abs(math.log2(ranks / layout.ranks))
    differ = sum(abs(math.log2(layout.degrees[axis] / wanted.degrees[axis])) for axis in AXES)
    unshared = 4 * (layout.shard_weights != wanted.shard_weights)
    return (round(idle + differ + unshared, 6), *(-layout.degrees[axis] for axis in _PREFERENCE))


def _covers(layout: ParallelLayout, other: ParallelLayout) -> bool:
    """Whether ``other`` has at most as many groups that each need a sample, a branch, a head, a block or a frame."""
    cfg = min(layout.cfg, _BRANCHES)
    return (
        other.data <= layout.data
        and other.cfg <= cfg
        and other.tensor <= layout.tensor
        and other.pipe <= layout.pipe
        and other.dsp <= layout.dsp
    )
