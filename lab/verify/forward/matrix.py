"""The cells of the parity matrix: families, layouts and shapes to compare with the stock forward."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parallel_backend.families.registry import FAMILIES
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.verify.examples import evenly_divisible_size, short_name, smallest_size, variants

SINGLE = tuple(f"{axis}={ranks}" for axis in ("ulysses", "ring", "tensor") for ranks in (2, 3, 4))
SHARDED = tuple(f"{axis}={ranks} shard_weights" for axis, ranks in (("ulysses", 2), ("ring", 3), ("ulysses", 4)))
WITH_CFG = ("cfg=2", "data=2 cfg=2")
PAIRS = ("ring=2 ulysses=2", "cfg=2 ulysses=2", "cfg=2 ring=2", "tensor=2 ulysses=2")
TRIPLES = ("cfg=2 ring=2 ulysses=2", "cfg=2 tensor=2 ulysses=2", "tensor=2 ring=2 ulysses=2")
UNEQUAL = ("ulysses=3 balance=1:1:0.5", "ring=3 balance=1:1:0.5", "tensor=3 balance=1:1:0.5/2:1:1")
"""Layouts whose ranks get unequal shares."""
IN_THREES = ("flux", "wan", "sd3", "hunyuan_video")
"""Families that also run on the eight ranks of ``TRIPLES``."""
WITHIN_FRAMES = (
    "dsp=2",
    "dsp=3",
    "dsp=4",
    "cfg=2 dsp=2",
    "data=2 dsp=2",
    "dsp=3 shard_weights",
    "dsp=3 balance=1:1:0.5",
)
"""Layouts of families whose frames attend only to themselves."""
FEW = (("ring=3", 1), ("tensor=2 ulysses=2", 1), ("tensor=2 ring=2", 2))
"""Layouts that run with one image token and, if a variant allows it, this many text tokens: some ranks have none."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison.

    Attributes:
        class_name: class of diffusers.
        variant: one of the family's variants.
        layout: the layout.
        size: of the latent; None for the variant's own.
        text: text tokens; None for the variant's own.
        batch: samples.
    """

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
    ("hunyuan_video", "t2v", "ulysses=4", (9, 40, 64), 256),
    ("hunyuan_video", "t2v", "ring=2 ulysses=2", (9, 40, 64), 256),
)
"""Shapes from real use that other projects refuse: 1024 px, 81 frames of 480p, 49 frames of 480 x 720, masked text."""


def every() -> Iterator[Cell]:
    """Yield the whole matrix: each variant with an indivisible shape, a divisible one, and the fewest tokens."""
    for class_name, name in variants():
        layouts = (*SINGLE, *SHARDED, *WITH_CFG, *PAIRS)
        if short_name(class_name) in IN_THREES:
            layouts += TRIPLES
        yield from _cells(class_name, name, layouts)
        yield from _even_cells(class_name, name, layouts)
        yield from few_cells(class_name, name, FEW)
        yield from _cells(class_name, name, UNEQUAL)
        yield from frame_cells(class_name, name)
    yield from named()


def named() -> Iterator[Cell]:
    """Yield the cells of ``NAMED``."""
    for family, variant, layout, size, text in NAMED:
        for class_name, name in variants():
            if (short_name(class_name), name) == (family, variant):
                yield from _cells(class_name, name, (layout,), size=size, text=text, batch=1)


def is_first_variant(class_name: str, name: str) -> bool:
    """Whether a variant is the first of its family."""
    return name == next(kind for family, kind in variants() if family == class_name)


def _even_cells(class_name: str, name: str, layouts: Iterable[str]) -> Iterator[Cell]:
    size, text = evenly_divisible_size(class_name, name)
    return _cells(class_name, name, layouts, size=size, text=text)


def few_cells(class_name: str, name: str, chosen: Iterable[tuple[str, int]]) -> Iterator[Cell]:
    """Yield cells with as few tokens as a variant allows, under layouts with a number of text tokens each."""
    for layout, tokens in chosen:
        size, text = smallest_size(class_name, name, tokens)
        yield from _cells(class_name, name, (layout,), size=size, text=text)


def frame_cells(class_name: str, name: str) -> Iterator[Cell]:
    """Yield cells in which ranks get whole frames, for families whose frames attend only to themselves."""
    if FAMILIES[class_name].within_frames:
        yield from _cells(class_name, name, WITHIN_FRAMES)
        yield from few_cells(class_name, name, (("dsp=3", 1),))


def _cells(class_name: str, name: str, layouts: Iterable[str], **shape: Any) -> Iterator[Cell]:
    for layout in layouts:
        yield Cell(class_name=class_name, variant=name, layout=ParallelLayout.parse(layout), **shape)
