"""``ParallelLayout``: how many ranks each way of splitting the work gets."""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import InvalidRequest

AXES: tuple[str, ...] = ("data", "cfg", "pipe", "ring", "ulysses", "tensor")
"""Mesh axes from the outermost to the innermost: neighbours on the right talk the most."""

SHARD_WEIGHTS = "shard_weights"
ONE_RANK = "one rank"
STALE: tuple[str, ...] = ("", "previous", "none")
"""What the ranks of ``ring`` see of one another's keys and values: all, those of the step before, or nothing."""
FASTEST = 1000
"""How many times as fast a rank may be said to be, and as slow."""
OPTIONS: dict[str, int] = {"patches": 0, "warmup": 1}
"""Numbers of a layout that are no degrees, and what they are when they are not given."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees per axis; their product is the number of ranks used.

    Attributes:
        shard_weights: whether the ranks of ``ring`` and ``ulysses`` share one copy of the weights among them.
        patches: pieces of the latent that ``pipe`` streams; 0 for twice as many as it has stages.
        stale: one of ``STALE``. Anything but the first is approximate in a step loop, as ``pipe`` with more patches
            than one is.
        warmup: steps at the start of a loop that are exact all the same.
        balance: how fast the stages of ``pipe``, or the patches of a stale ``ring``, are computed, relative to one
            another; empty for what is measured.

    Raises:
        InvalidRequest: a number is none that there can be, or an option is of no use to the axes; any ``warmup`` may
            stay.
    """

    data: int = 1
    cfg: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    shard_weights: bool = False
    patches: int = OPTIONS["patches"]
    stale: str = STALE[0]
    warmup: int = OPTIONS["warmup"]
    balance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if not _whole(degree) or degree < 1:
                raise InvalidRequest(f"layout {axis}={degree!r}: a degree is a whole number of at least 1")
        for name in OPTIONS:
            if not _whole(getattr(self, name)) or getattr(self, name) < 0:
                raise InvalidRequest(f"layout {name}={getattr(self, name)!r}: a whole number of at least 0 works")
        if self.stale not in STALE:
            known = ", ".join(filter(None, STALE))
            raise InvalidRequest(f"layout stale={self.stale!r}: {known} would work, or none of it, which is exact")

        if any(not 1 / FASTEST <= speed <= FASTEST for speed in self.balance):
            raise InvalidRequest(
                f"layout {_balance(self)}: speeds are numbers from {1 / FASTEST:g} to {FASTEST}, such as balance=2:1"
            )
        self._check_combination()
        self._check_balance()

    def _check_combination(self) -> None:
        refusals = (
            (
                self.stale and self.ring == 1,
                "stale keys and values are those of the other ranks of ring, whose degree is 1; raise it, as in "
                f'"ring=2 stale={self.stale}"',
            ),
            (
                self.stale and self.pipe > 1,
                "the stages of pipe have a way of their own to reuse keys and values; leave out "
                f"stale={self.stale}, or pipe={self.pipe}",
            ),
            (
                self.warmup == 0 and self.approximate and self.stale != "none",
                "the first step has no keys and values of a step before it; warmup of at least 1 would work",
            ),
            (
                self.patches and self.pipe == 1,
                "patches are what the stages of pipe stream, whose degree is 1; raise it, as in "
                f'"pipe=2 patches={self.patches}"',
            ),
            (
                self.pipe > 1 and (self.shard_weights or self.tensor > 1),
                f"the stages of pipe={self.pipe} hold a part of the weights each already; leave out shard_weights and "
                "tensor, and use ulysses or ring beside pipe",
            ),
            (
                self.shard_weights and self.sequence == 1,
                "the ranks of ring and ulysses are those that share weights, and both degrees are 1; raise one of "
                'them, as in "ulysses=2 shard_weights"',
            ),
        )
        for refused, reason in refusals:
            if refused:
                raise InvalidRequest(f'layout "{self}": {reason}')

    def _check_balance(self) -> None:
        if self.balance and not self.adapts:
            raise InvalidRequest(
                f'layout "{self}": balance is how fast the stages of pipe, or the patches of a stale ring, are; leave '
                "it out, or raise pipe"
            )
        axis = "pipe" if self.pipe > 1 else "ring"
        if self.balance and len(self.balance) != self.degrees[axis]:
            raise InvalidRequest(
                f"layout {_balance(self)} has {len(self.balance)} speeds and {axis}={self.degrees[axis]}: give one for "
                "each"
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

    @property
    def adapts(self) -> bool:
        """Whether its stages or patches are cut by how fast the ranks are."""
        return self.pipe > 1 or bool(self.stale)

    @property
    def approximate(self) -> bool:
        """Whether a step loop of ours is not exact after its warm-up; single calls always are."""
        return bool(self.approximation)

    @property
    def approximation(self) -> str:
        """The algorithm that is not exact after its warm-up, in a step loop of ours; empty if there is none, as with
        one patch in a pipeline."""
        by_stale = {"previous": "displaced patch", "none": "naive patch"}
        return "PipeFusion" if self.pipe > 1 and self.patches != 1 else by_stale.get(self.stale, "")

    @property
    def cut(self) -> "ParallelLayout":
        """The same without numbers that leave every rank the weights and the share of the work that it has."""
        return replace(self, patches=OPTIONS["patches"], warmup=OPTIONS["warmup"])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis, the last the fastest, and on the sequence (ring and ulysses as one)."""
        place = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, place[axis] = divmod(rank, degree)
        return place | {"sequence": place["ring"] * self.ulysses + place["ulysses"]}

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree != 1]
        options = [f"{name}={getattr(self, name)}" for name, usual in OPTIONS.items() if getattr(self, name) != usual]
        stale = [f"stale={self.stale}"] if self.stale else []
        options += [_balance(self)] if self.balance else []
        return " ".join([*used, *([SHARD_WEIGHTS] if self.shard_weights else []), *stale, *options]) or ONE_RANK

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Read ``"cfg=2 ulysses=2"``, ``"ulysses=2 shard_weights"`` or ``"one rank"``; an empty text is that, too.

        Raises:
            InvalidRequest: an unknown axis or a degree that is no number.
        """
        words = [] if text == ONE_RANK else text.split()
        found: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name in found:
                raise InvalidRequest(f"layout {text!r}: {name} is there twice; name each once")
            found[name] = _read(word, name, value)
        return cls(**found)


def auto(ranks: int, *, branches: int) -> ParallelLayout:
    """The simple rule for no given layout: CFG first, because it sends the least, then Ulysses.

    With guidance (two or more branches) and an even number of ranks, two groups share the branches;
    the ranks left split the tokens. Otherwise all ranks split the tokens.
    """
    if branches >= 2 and ranks % 2 == 0:
        return ParallelLayout(cfg=2, ulysses=ranks // 2)
    return ParallelLayout(ulysses=ranks)


def _read(word: str, name: str, value: str) -> Any:
    """The value of a word of a layout."""
    if word == SHARD_WEIGHTS:
        return True
    if name in (*AXES, *OPTIONS) and re.fullmatch("-?[0-9]{1,9}", value):
        return int(value)
    if name == "stale" and value:
        return value
    if name == "balance":
        return read_balance(value)
    raise InvalidRequest(
        f"layout {word!r}: write AXIS=DEGREE with an axis of {', '.join(AXES)}, or {SHARD_WEIGHTS}, stale=previous, "
        "stale=none, patches=N, warmup=N, balance=2:1"
    )


def read_balance(text: str) -> tuple[float, ...]:
    """Read ``"2:1"``; an empty text is no balance.

    Raises:
        InvalidRequest: a speed is no number.
    """
    try:
        return tuple(map(float, text.split(":"))) if text.strip() else ()
    except ValueError as error:
        raise InvalidRequest(f"layout balance={text}: write speeds as numbers above 0, such as 2:1") from error


def _balance(layout: ParallelLayout) -> str:
    return "balance=" + ":".join(f"{speed:g}" for speed in layout.balance)


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


assert {field.name for field in fields(ParallelLayout)} == {*AXES, SHARD_WEIGHTS, "stale", "balance", *OPTIONS}
