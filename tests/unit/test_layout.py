"""Layouts: what they refuse, and the rule without one."""

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.layout import ParallelLayout, auto


def test_ranks_and_text():
    layout = ParallelLayout(data=2, cfg=2, ulysses=3)
    assert layout.ranks == 12
    assert str(layout) == "data=2 cfg=2 ulysses=3"
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.parse("") == ParallelLayout()
    assert str(ParallelLayout()) == "one rank"


@pytest.mark.parametrize("degree", [0, -1, 1.5, True, "2"])
def test_degrees_are_whole_numbers_from_1(degree):
    with pytest.raises(InvalidRequest, match="whole number of at least 1"):
        ParallelLayout(ulysses=degree)


def test_axes_that_are_not_built_are_refused_by_name():
    with pytest.raises(InvalidRequest, match="pipe=2: this strategy is not built yet"):
        ParallelLayout(pipe=2)


@pytest.mark.parametrize("text", ["speed=2", "ulysses", "ulysses=two", "ulysses="])
def test_text_that_is_no_layout(text):
    with pytest.raises(InvalidRequest, match="AXIS=DEGREE"):
        ParallelLayout.parse(text)


def test_too_few_ranks_names_what_would_fit():
    with pytest.raises(InvalidRequest, match=r'needs 4 ranks and there are 3; .* "ulysses=3", "cfg=2"'):
        ParallelLayout(cfg=2, ulysses=2).check_fits(3)
    ParallelLayout(cfg=2, ulysses=2).check_fits(4)


@pytest.mark.parametrize(
    ("ranks", "branches", "text"),
    [(1, 2, ""), (2, 2, "cfg=2"), (4, 2, "cfg=2 ulysses=2"), (3, 2, "ulysses=3"), (4, 1, "ulysses=4")],
)
def test_auto(ranks, branches, text):
    assert auto(ranks, branches=branches) == ParallelLayout.parse(text)
