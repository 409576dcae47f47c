"""The cells that CI runs: a pairwise cover of family, strategy, number of ranks and shape.

Most faults need two factors to meet (Kuhn, Wallace and Gallo, "Software Fault Interactions and Implications for
Software Testing", 2004). So each pair of values of two factors is in some cell, but not each triple. Beyond that, each
variant of a family runs once with its tokens split and once with its weights cut by ``tensor``, since variants differ
in their streams and layers, and each family runs with ranks that hold no image tokens or no text tokens.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.verify.examples import evenly_divisible_size, smallest_size, variants

from .matrix import FEW, Cell, few_cells, frame_cells

LAYOUTS: Mapping[str, Mapping[int, str]] = {
    "ulysses": {2: "ulysses=2", 3: "ulysses=3", 4: "ulysses=4"},
    "ring": {2: "ring=2", 3: "ring=3", 4: "ring=2 ulysses=2"},
    "tensor": {2: "tensor=2", 3: "tensor=3", 4: "ring=2 tensor=2"},
    "cfg": {2: "cfg=2", 4: "cfg=2 ulysses=2"},
    "data": {2: "data=2", 3: "data=3", 4: "data=2 cfg=2"},
    "pipe": {2: "pipe=2", 4: "pipe=2 ring=2"},
    "shard_weights": {2: "ulysses=2 shard_weights", 3: "ring=3 shard_weights", 4: "ring=2 ulysses=2 shard_weights"},
}
"""Layout text by strategy and number of ranks. No layout of ``cfg`` has three ranks, and the
small models have two blocks, so two stages at most."""

SHAPES = ("own", "even", "few")
"""The variant's own, which is not divisible by any number of ranks; one that is by all; a few tokens, which may be
fewer than ranks."""

FEW_TOKENS = 2
EMPTY_RANKS = FEW[1:]
"""Layouts with ``tensor`` that leave ranks without image or text tokens: each family pads these in its own way."""


class Choice(NamedTuple):
    """One value of each factor."""

    family: str
    strategy: str
    ranks: int
    shape: str


def choices() -> list[Choice]:
    """A pairwise cover, chosen greedily: the choice that covers most uncovered pairs is next, rarer ranks first."""
    families = list(dict.fromkeys(class_name for class_name, _ in variants()))
    possible = {
        choice: pairs(choice)
        for family, (strategy, layouts), shape in itertools.product(families, LAYOUTS.items(), SHAPES)
        for choice in (Choice(family, strategy, ranks, shape) for ranks in layouts)
    }
    uncovered = set().union(*possible.values())
    cover: list[Choice] = []
    taken: Counter[int] = Counter()
    while uncovered:
        best = max(possible, key=lambda choice: (len(uncovered & possible[choice]), -taken[choice.ranks]))
        uncovered -= possible[best]
        taken[best.ranks] += 1
        cover.append(best)
    return cover


def pairs(choice: Choice) -> set[tuple[tuple[str, object], ...]]:
    """All pairs of values that a choice covers, each value with its factor's name."""
    return set(itertools.combinations(choice._asdict().items(), 2))


def ci() -> Iterator[Cell]:
    """The cells of CI, family by family."""
    chosen = choices()
    kinds: dict[str, list[str]] = {}
    for class_name, name in variants():
        kinds.setdefault(class_name, []).append(name)
    for class_name, names in kinds.items():
        cells = [*_family_cells(names, [choice for choice in chosen if choice.family == class_name])]
        cells += few_cells(class_name, names[0], EMPTY_RANKS)
        cells += frame_cells(class_name, names[0])
        # Cells of one variant follow each other: they share the stock forward.
        yield from sorted(cells, key=lambda cell: names.index(cell.variant))


def _family_cells(names: list[str], chosen: list[Choice]) -> Iterator[Cell]:
    """Yield the cells of one family, then cells in which each variant runs split and cut.

    Shape "own" takes the variant with the fewest runs so far, any other the first variant, which allows all shapes.
    """
    split, cut = Counter(dict.fromkeys(names, 0)), Counter(dict.fromkeys(names, 0))
    for choice in chosen:
        layout = layout_of(choice)
        runs = cut if layout.tensor > 1 else split
        name = min(names, key=runs.__getitem__) if choice.shape == "own" else names[0]
        split[name] += layout.sequence > 1 and choice.shape == "own"
        cut[name] += layout.tensor > 1 and choice.shape == "own"
        yield _cell(name, choice)
    family = chosen[0].family
    yield from (_cell(name, Choice(family, "ulysses", 3, "own")) for name in names if not split[name])
    yield from (_cell(name, Choice(family, "tensor", 3, "own")) for name in names if not cut[name])


def layout_of(choice: Choice) -> ParallelLayout:
    """The layout of a choice's strategy and number of ranks."""
    return ParallelLayout.parse(LAYOUTS[choice.strategy][choice.ranks])


def _cell(name: str, choice: Choice) -> Cell:
    cell = Cell(class_name=choice.family, variant=name, layout=layout_of(choice))
    if choice.shape == "own":
        return cell
    size, text = (
        evenly_divisible_size(choice.family, name)
        if choice.shape == "even"
        else smallest_size(choice.family, name, FEW_TOKENS)
    )
    return replace(cell, size=size, text=text)
