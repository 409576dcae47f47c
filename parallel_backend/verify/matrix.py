"""The cells of the parity matrix: which families are held to the stock forward under which layouts and shapes."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..layout import ParallelLayout
from .examples import short_name, variants

SINGLE = tuple(f"{axis}={ranks}" for axis in ("ulysses", "ring", "tensor") for ranks in (2, 3, 4))
SHARDED = tuple(f"{axis}={ranks} shard_weights" for axis, ranks in (("ulysses", 2), ("ring", 3), ("ulysses", 4)))
WITH_CFG = ("cfg=2", "data=2 cfg=2")
PAIRS = ("ring=2 ulysses=2", "cfg=2 ulysses=2", "cfg=2 ring=2", "tensor=2 ulysses=2")
TRIPLES = ("cfg=2 ring=2 ulysses=2", "cfg=2 tensor=2 ulysses=2", "tensor=2 ring=2 ulysses=2")
IN_THREES = ("flux", "wan", "sd3", "hunyuan_video")
"""Families that run on eight ranks as well."""
CI = ("ulysses=3", "ring=3", "tensor=2", "ring=2 shard_weights", "cfg=2", "ring=2 ulysses=2")
"""The layouts that CI runs, with the shape of the variant alone."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison. ``size`` and ``text`` are the variant's own where they are None."""

    class_name: str
    variant: str
    layout: ParallelLayout
    size: tuple[int, ...] | None = None
    text: int | None = None
    batch: int = 2

    def __str__(self) -> str:
        shape = "" if self.size is None else f", latent {'x'.join(map(str, self.size))}"
        text = "" if self.text is None else f", {self.text} text tokens"
        return f"{short_name(self.class_name)} {self.variant}, {self.layout}{shape}{text}"


NAMED: tuple[tuple[str, str, str, tuple[int, ...], int], ...] = (
    ("flux", "dev", "ulysses=3", (128, 128), 512),
    ("flux", "dev", "ring=3", (128, 128), 512),
    ("wan", "t2v", "ulysses=3", (21, 60, 104), 512),
    ("cogvideox", "2b", "ulysses=4", (13, 60, 90), 226),
    ("cogvideox", "2b", "ring=2 ulysses=2", (13, 60, 90), 226),
)
"""Shapes of real use that others refuse: 1024 pixels, 81 frames of 480p, 49 frames of 480 x 720."""


def every() -> Iterator[Cell]:
    """The whole matrix."""
    for class_name, name in variants():
        for layout in (*SINGLE, *SHARDED, *WITH_CFG, *PAIRS):
            yield Cell(class_name=class_name, variant=name, layout=ParallelLayout.parse(layout))
        if short_name(class_name) in IN_THREES:
            for layout in TRIPLES:
                yield Cell(class_name=class_name, variant=name, layout=ParallelLayout.parse(layout))
    yield from named()


def named() -> Iterator[Cell]:
    """The cells of ``NAMED``."""
    for class_name, name in variants():
        for family, variant, layout, size, text in NAMED:
            if (short_name(class_name), name) == (family, variant):
                yield Cell(
                    class_name=class_name, variant=name, layout=ParallelLayout.parse(layout),
                    size=size, text=text, batch=1,
                )  # fmt: skip


def ci() -> Iterator[Cell]:
    """What CI runs."""
    for class_name, name in variants():
        for layout in CI:
            yield Cell(class_name=class_name, variant=name, layout=ParallelLayout.parse(layout))
