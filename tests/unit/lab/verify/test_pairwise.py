"""The cells of CI cover every pair of factors."""

import itertools
from typing import Any

from lab.verify.forward import pairwise
from lab.verify.forward.matrix import is_first_variant
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.verify import examples

KINDS = list(examples.variants())
CELLS = list(pairwise.ci())


def test_every_pair_of_factors_is_in_a_cell():
    families = {class_name for class_name, _ in KINDS}
    factors: dict[str, set[Any]] = {
        "family": families,
        "strategy": set(pairwise.LAYOUTS),
        "ranks": {2, 3, 4},
        "shape": set(pairwise.SHAPES),
    }
    wanted = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    } - {(("strategy", strategy), ("ranks", 3)) for strategy in ("cfg", "pipe")}
    assert set().union(*map(pairwise.pairs, pairwise.choices())) == wanted


def test_every_choice_becomes_a_cell_of_its_layout_and_shape():
    layouts = [(choice.family, pairwise.layout_of(choice), choice.shape == "own") for choice in pairwise.choices()]
    cells = [(cell.class_name, cell.layout, cell.size is None) for cell in CELLS]
    assert all(cells.count(wanted) >= layouts.count(wanted) for wanted in layouts)
    for choice in pairwise.choices():
        assert pairwise.layout_of(choice).ranks == choice.ranks


def test_every_variant_runs_with_its_tokens_split_and_with_its_weights_cut():
    own = [cell for cell in CELLS if cell.size is None]
    assert {(cell.class_name, cell.variant) for cell in own if cell.layout.sequence > 1} == set(KINDS)
    assert {(cell.class_name, cell.variant) for cell in own if cell.layout.tensor > 1} == set(KINDS)


def test_other_shapes_take_the_variant_that_allows_them():
    assert all(is_first_variant(cell.class_name, cell.variant) for cell in CELLS if cell.size is not None)
    assert all(isinstance(cell.layout, ParallelLayout) for cell in CELLS)


def test_every_family_runs_with_ranks_without_tokens_under_tensor():
    wanted = {ParallelLayout.parse(layout) for layout, _ in pairwise.EMPTY_RANKS}
    for class_name in {class_name for class_name, _ in KINDS}:
        few = {cell.layout for cell in CELLS if cell.class_name == class_name and cell.size is not None}
        assert few >= wanted
