"""``ParallelLayout``: the number of ranks along each axis, one axis for each way of splitting the work."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import InvalidRequest
from .balance import check_speeds, format_balance, parse_balance

AXES: tuple[str, ...] = ("data", "cfg", "pipe", "ring", "ulysses", "dsp", "tensor")
"""Mesh axes from the outermost to the innermost. Ranks along the innermost axes communicate the most."""

SHARING = ("ring", "ulysses", "dsp", "tensor")
"""Axes whose ranks share a row. ``cfg`` and ``data`` share whole rows, and stages of ``pipe`` blocks."""
SHARD_WEIGHTS = "shard_weights"
ONE_RANK = "one rank"
STALE: tuple[str, ...] = ("", "previous", "none")
"""Which keys and values of the other ranks of ``ring`` a rank attends to: all current ones, the previous step's, or
none."""
MAX_DEGREE = 999_999_999
"""Largest degree: nine digits, as ``parse`` accepts."""
OPTIONS: dict[str, int] = {"patches": 0, "warmup": 1}
"""The numbers of a layout that are not degrees, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The degree of each axis; their product is the number of ranks used.

    Attributes:
        data: groups that split the samples.
        cfg: groups that split the branches of guidance.
        pipe: stages that split the blocks.
        ring: ranks that split the tokens and pass keys and values around.
        ulysses: ranks that split the tokens and exchange them for heads.
        dsp: ranks that split the tokens and exchange them for frames, in models whose frames attend only to themselves.
        tensor: ranks that split the layers.
        shard_weights: whether the ranks of ``sequence`` share one copy of the weights.
        patches: number of patches of the latent that ``pipe`` streams; 0 means twice the number of stages.
        stale: one of ``STALE``. All but the first are approximate in a step loop, as is ``pipe`` with more than one
            patch.
        warmup: number of steps at the start of a step loop that are exact even in an approximate layout.
        balance: relative speeds of the stages of ``pipe``, of the patches of a stale ``ring``, or otherwise of the
            ranks that share a row (see ``shares_row``) or, where none do, of the groups of ``data``. If it is empty,
            those of stages and patches are measured, and other ranks count as equally fast.
        attention_balance: relative speeds in attention of the ranks that share a row, where they differ from those in
            linear layers; empty if they do not.

    Raises:
        InvalidRequest: a value is out of range, or an option does not apply to the axes. A ``warmup`` that has no
            effect is accepted.
    """

    data: int = 1
    cfg: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    dsp: int = 1
    tensor: int = 1
    shard_weights: bool = False
    patches: int = OPTIONS["patches"]
    stale: str = STALE[0]
    warmup: int = OPTIONS["warmup"]
    balance: tuple[float, ...] = ()
    attention_balance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if not _is_whole(degree) or not 1 <= degree <= MAX_DEGREE:
                raise InvalidRequest(
                    f"layout {axis}={degree!r}: a degree must be a whole number of at least 1, and at most {MAX_DEGREE}"
                )
        for name in OPTIONS:
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 0:
                raise InvalidRequest(f"layout {name}={getattr(self, name)!r}: must be a whole number of at least 0")
        if self.stale not in STALE:
            known = " or ".join(filter(None, STALE))
            raise InvalidRequest(f"layout stale={self.stale!r}: use {known}, or leave it out to stay exact")
        check_speeds(self.balance, self.attention_balance)
        self._check_combination()
        self._check_balance()

    def _check_combination(self) -> None:
        refusals = (
            (
                self.stale and self.ring == 1,
                f"stale={self.stale} applies to the ranks of ring, and ring is 1; raise it, as in "
                f'"ring=2 stale={self.stale}"',
            ),
            (
                self.stale and self.pipe > 1,
                f"the stages of pipe reuse keys and values in their own way; leave out stale={self.stale}, or "
                f"pipe={self.pipe}",
            ),
            (
                self.warmup == 0 and self.approximate and self.stale != "none",
                "the first step has no previous keys and values to reuse; warmup of at least 1 would work",
            ),
            (
                self.patches and self.pipe == 1,
                f"patches={self.patches} applies to the stages of pipe, and pipe is 1; raise it, as in "
                f'"pipe=2 patches={self.patches}"',
            ),
            (
                self.pipe > 1 and (self.shard_weights or self.tensor > 1),
                f"each stage of pipe={self.pipe} already holds only a part of the weights; leave out shard_weights and "
                "tensor, and use ulysses or ring beside pipe",
            ),
            (
                self.shard_weights and self.sequence == 1,
                "shard_weights shares the weights among the ranks that split tokens, and ring, ulysses and dsp are 1; "
                'raise one of them, as in "ulysses=2 shard_weights"',
            ),
            (
                self.dsp > 1 and max(self.pipe, self.ring, self.ulysses, self.tensor) > 1,
                f"a rank of dsp={self.dsp} attends to whole frames with all heads; leave out pipe, ring, ulysses and "
                "tensor",
            ),
        )
        for refused, reason in refusals:
            if refused:
                raise InvalidRequest(f'layout "{self}": {reason}')

    def _check_balance(self) -> None:
        what, count = self._balanced
        for speeds in filter(None, (self.balance, self.attention_balance)):
            if count == 1:
                raise InvalidRequest(
                    f'layout "{self}": balance gives the speeds of ranks that share a row or the samples, and cfg '
                    "gives each rank a prompt; leave it out, or raise ulysses, ring, dsp, tensor, pipe or data"
                )
            if len(speeds) != count:
                raise InvalidRequest(
                    f"layout {self._format_balance()} has {len(speeds)} speeds and {what}={count}: give one for each"
                )
        shares_attention = not self.adapts and max(self.ulysses, self.dsp, self.tensor) > 1
        if self.attention_balance and not (self.balance and shares_attention):
            raise InvalidRequest(
                f'layout "{self}": only the ranks of ulysses, dsp and tensor in an exact layout without pipe share '
                f"heads or frames by speeds of their own; leave out what follows the slash, as in "
                f"balance={self._first_speeds()}"
            )

    @property
    def _balanced(self) -> tuple[str, int]:
        """What ``balance`` has a speed for, in words, and how many there are."""
        if self.adapts:
            axis = "pipe" if self.pipe > 1 else "ring"
            return axis, self.degrees[axis]
        if self.shares_samples:
            return "data", self.data
        return "*".join(axis for axis in SHARING if self.degrees[axis] > 1), self.shares_row

    def _first_speeds(self) -> str:
        return ":".join(f"{speed:g}" for speed in self.balance or (1.0,) * self._balanced[1])

    def _format_balance(self) -> str:
        return format_balance(self.balance, self.attention_balance)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, in the order of ``AXES``."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        """Number of ranks that the layout uses."""
        return math.prod(self.degrees.values())

    @property
    def sequence(self) -> int:
        """Number of ranks that split the tokens of a row."""
        return self.ring * self.ulysses * self.dsp

    @property
    def shares_row(self) -> int:
        """Number of ranks that share a row: its tokens (``sequence``), and each of them the layers (``tensor``)."""
        return self.sequence * self.tensor

    @property
    def shares_samples(self) -> bool:
        """Whether ``balance`` is for the groups of ``data``, since no ranks share a row."""
        return self.data > 1 and self.shares_row == 1 and self.pipe == 1

    @property
    def splits_weights(self) -> bool:
        """Whether a rank holds only a part of the transformer's weights."""
        return self.shard_weights or self.tensor > 1 or self.pipe > 1

    @property
    def adapts(self) -> bool:
        """Whether stages or patches are cut according to the speeds of the ranks, which are measured."""
        return self.pipe > 1 or bool(self.stale)

    def at(self, speeds: Sequence[float]) -> "ParallelLayout":
        """Return the layout balanced by measured speeds, one for each rank, if it adapts to them and has no balance.

        The slowest rank of a stage or patch counts. Where all are equal, the layout stays as it is.
        """
        if not self.adapts or self.balance or not speeds:
            return self
        axis, count = self._balanced
        places = [self.coordinates(rank)[axis] for rank in range(self.ranks)]
        slowest = tuple(
            min(speed for place, speed in zip(places, speeds[: self.ranks], strict=True) if place == i)
            for i in range(count)
        )
        return self if len(set(slowest)) == 1 else replace(self, balance=slowest)

    @property
    def approximate(self) -> bool:
        """Whether the backend's step loop is approximate after its warm-up; single calls are always exact."""
        return bool(self.approximation)

    @property
    def approximation(self) -> str:
        """Name of the algorithm that makes the backend's step loop approximate after its warm-up.

        Empty if the layout is exact, which includes ``pipe`` with one patch.
        """
        by_stale = {"previous": "displaced patch", "none": "naive patch"}
        return "PipeFusion" if self.pipe > 1 and self.patches != 1 else by_stale.get(self.stale, "")

    @property
    def cut(self) -> "ParallelLayout":
        """The layout with default ``patches`` and ``warmup``, which do not affect the weights or work of a rank."""
        return replace(self, patches=OPTIONS["patches"], warmup=OPTIONS["warmup"])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` on every axis, and on ``"sequence"`` (ring, ulysses and dsp as one).

        The last axis varies fastest.
        """
        place = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, place[axis] = divmod(rank, degree)
        return place | {"sequence": (place["ring"] * self.ulysses + place["ulysses"]) * self.dsp + place["dsp"]}

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree != 1]
        options = [f"{name}={getattr(self, name)}" for name, value in OPTIONS.items() if getattr(self, name) != value]
        stale = [f"stale={self.stale}"] if self.stale else []
        options += [self._format_balance()] if self.balance else []
        return " ".join([*used, *([SHARD_WEIGHTS] if self.shard_weights else []), *stale, *options]) or ONE_RANK

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """Parse ``"cfg=2 ulysses=2"``, ``"ulysses=2 shard_weights"`` or ``"one rank"``; ``""`` is one rank, too.

        Raises:
            InvalidRequest: an axis or option is unknown or named twice, or its value cannot be parsed.
        """
        words = [] if text == ONE_RANK else text.split()
        values: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name in values:
                raise InvalidRequest(f"layout {text!r} names {name} twice; name it once")
            if name == "balance":
                values[name], values["attention_balance"] = parse_balance(value)
            else:
                values[name] = _parse_value(word, name, value)
        return cls(**values)


def _parse_value(word: str, name: str, value: str) -> Any:
    """Return the value of one word of a layout."""
    if word == SHARD_WEIGHTS:
        return True
    if name in (*AXES, *OPTIONS) and re.fullmatch("-?[0-9]{1,9}", value):
        return int(value)
    if name == "stale" and value:
        return value
    raise InvalidRequest(
        f"layout {word!r}: write AXIS=DEGREE with an axis of {', '.join(AXES)}, or {SHARD_WEIGHTS}, stale=previous, "
        "stale=none, patches=N, warmup=N, balance=2:1"
    )


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


assert {field.name for field in fields(ParallelLayout)} == {
    *AXES, SHARD_WEIGHTS, "stale", "balance", "attention_balance", *OPTIONS,
}  # fmt: skip
