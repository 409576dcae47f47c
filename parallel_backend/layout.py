"""``ParallelLayout``: how many ranks each way of splitting the work gets."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from .errors import InvalidRequest

AXES: tuple[str, ...] = ("data", "cfg", "pipe", "ring", "ulysses", "tensor")
"""Mesh axes from the outermost to the innermost: neighbours on the right talk the most."""

BUILT: tuple[str, ...] = ("data", "cfg", "ring", "ulysses", "tensor")
"""Axes that may have a degree above 1 today."""

SHARD_WEIGHTS = "shard_weights"
ONE_RANK = "one rank"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees per axis; their product is the number of ranks used.

    ``shard_weights`` has the ranks of ``ring`` and ``ulysses`` share one copy of the weights among them.

    Raises:
        InvalidRequest: a degree is not a whole number of at least 1, its axis is not built yet, or nobody is there
            to share weights with.
    """

    data: int = 1
    cfg: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    shard_weights: bool = False

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise InvalidRequest(f"layout {axis}={degree!r}: a degree is a whole number of at least 1")
            if degree > 1 and axis not in BUILT:
                raise InvalidRequest(
                    f"layout {axis}={degree}: this strategy is not built yet; "
                    f"degrees above 1 work for {', '.join(BUILT)}"
                )

        if self.shard_weights and self.sequence == 1:
            raise InvalidRequest(
                f'layout "{self}": the ranks of ring and ulysses are those that share weights, and both degrees are 1; '
                'raise one of them, as in "ulysses=2 shard_weights"'
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, in the order of ``AXES``."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        """Number of ranks the layout uses."""
        return math.prod(self.degrees.values())

    @property
    def sequence(self) -> int:
        """Number of ranks that share out the tokens of a row."""
        return self.ring * self.ulysses

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis, the last the fastest, and on the sequence (ring and ulysses as one)."""
        place = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, place[axis] = divmod(rank, degree)
        return place | {"sequence": place["ring"] * self.ulysses + place["ulysses"]}

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree != 1]
        return " ".join([*used, *([SHARD_WEIGHTS] if self.shard_weights else [])]) or ONE_RANK

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Read ``"cfg=2 ulysses=2"``, ``"ulysses=2 shard_weights"`` or ``"one rank"``; an empty text is that, too.

        Raises:
            InvalidRequest: an unknown axis or a degree that is no number.
        """
        words = [] if text == ONE_RANK else text.split()
        degrees: dict[str, int] = {}
        for word in words:
            axis, _, degree = word.partition("=")
            if word == SHARD_WEIGHTS:
                continue
            if axis not in AXES or not degree.lstrip("-").isdigit():
                raise InvalidRequest(
                    f"layout {word!r}: write AXIS=DEGREE with an axis of {', '.join(AXES)}, or {SHARD_WEIGHTS}"
                )
            if axis in degrees:
                raise InvalidRequest(f"layout {text!r}: {axis} is there twice; name each axis once")
            degrees[axis] = int(degree)
        return cls(**degrees, shard_weights=SHARD_WEIGHTS in words)

    def check_fits(self, ranks: int, works: "Works | None" = None) -> None:
        """Refuse a layout that needs more ranks than there are, naming the nearest ones that fit.

        ``works`` tells those that pass all other checks. Without it, where model and request are not known, they are
        those that ask no more of them than this one does.

        Raises:
            InvalidRequest: the layout uses more than ``ranks`` ranks.
        """
        if self.ranks <= ranks:
            return
        near = would_work(self, ranks, works or self._covers)
        raise InvalidRequest(f'layout "{self}" needs {self.ranks} ranks and there are {ranks}; {near}')

    def _covers(self, other: "ParallelLayout") -> bool:
        """Whether another layout has no more groups that need a part of the batch, of the guidance or of the heads."""
        cfg = min(self.cfg, _BRANCHES)
        return other.data <= self.data and other.cfg <= cfg and other.tensor <= self.tensor


Works = Callable[[ParallelLayout], bool]

_BRANCHES = 2
"""What guidance computes in ComfyUI: the positive prompt and the negative one."""

_BEFORE = ("ulysses", "ring", "tensor", "cfg", "data")
"""Of layouts that are equally near, those with more on the axes named first go before."""


def would_work(wanted: ParallelLayout, ranks: int, works: Works) -> str:
    """What to say of the layouts nearest to one that was refused."""
    return "would work: " + ", ".join(f'"{layout}"' for layout in nearest(wanted, ranks, works))


def nearest(wanted: ParallelLayout, ranks: int, works: Works, *, count: int = 3) -> list[ParallelLayout]:
    """Of the layouts of at most ``ranks`` ranks that work, the nearest to ``wanted``, the nearest first.

    Far are ranks that are left idle, degrees that differ, and weights that are no longer shared; one rank, which
    always works, is among them.
    """
    fitting = [layout for layout in _layouts(ranks, wanted.shard_weights) if works(layout)]
    return sorted(fitting, key=lambda layout: _distance(layout, wanted, min(wanted.ranks, ranks)))[:count]


def _layouts(ranks: int, shard_weights: bool) -> Iterator[ParallelLayout]:
    """All layouts of at most ``ranks`` ranks, weights shared where somebody is there to share them."""

    def grow(axes: tuple[str, ...], room: int, degrees: dict[str, int]) -> Iterator[ParallelLayout]:
        if not axes:
            shared = shard_weights and degrees["ring"] * degrees["ulysses"] > 1
            yield ParallelLayout(**degrees, shard_weights=shared)
            return
        for degree in range(1, room + 1):
            yield from grow(axes[1:], room // degree, {**degrees, axes[0]: degree})

    return grow(BUILT, ranks, {})


def _distance(layout: ParallelLayout, wanted: ParallelLayout, ranks: int) -> tuple[float, ...]:
    idle = 2 * abs(math.log2(ranks / layout.ranks))
    differ = sum(abs(math.log2(layout.degrees[axis] / wanted.degrees[axis])) for axis in BUILT)
    unshared = 4 * (layout.shard_weights != wanted.shard_weights)
    return (round(idle + differ + unshared, 6), *(-layout.degrees[axis] for axis in _BEFORE))


def auto(ranks: int, *, branches: int) -> ParallelLayout:
    """The simple rule for no given layout: CFG first, because it sends the least, then Ulysses.

    With guidance (two or more branches) and an even number of ranks, two groups share the branches;
    the ranks left split the tokens. Otherwise all ranks split the tokens.
    """
    if branches >= 2 and ranks % 2 == 0:
        return ParallelLayout(cfg=2, ulysses=ranks // 2)
    return ParallelLayout(ulysses=ranks)


assert tuple(field.name for field in fields(ParallelLayout)) == (*AXES, SHARD_WEIGHTS)
