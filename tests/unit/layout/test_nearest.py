"""Suggestions for a layout that does not fit."""

import re

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.suggestions import check_fits, nearest


def suggested(sentence):
    """Return the layouts that an error message suggests."""
    return re.findall(r'"([^"]+)"', sentence.partition("would work: ")[2])


def test_too_few_ranks_suggests_what_would_fit():
    with pytest.raises(InvalidRequest, match=r"needs 4 ranks and there are 3; ") as refused:
        check_fits(ParallelLayout(cfg=2, ulysses=2), 3)
    assert suggested(str(refused.value)) == ["ulysses=3", "ulysses=2", "cfg=2"]
    check_fits(ParallelLayout(cfg=2, ulysses=2), 4)


@pytest.mark.parametrize("wanted", ["cfg=2 ulysses=4", "tensor=8", "data=2 tensor=4", "ring=8 shard_weights"])
@pytest.mark.parametrize("ranks", [1, 3, 5, 7])
def test_suggestions_fit_and_demand_no_more(wanted, ranks):
    requested = ParallelLayout.parse(wanted)
    with pytest.raises(InvalidRequest) as refused:
        check_fits(requested, ranks)
    layouts = [ParallelLayout.parse(text) for text in suggested(str(refused.value))]
    assert layouts
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        check_fits(layout, ranks)
        assert all(layout.degrees[axis] <= requested.degrees[axis] for axis in ("data", "cfg", "tensor"))
    assert layouts[0].shard_weights == (requested.shard_weights and ranks > 1)


def test_the_nearest_layouts_leave_the_fewest_ranks_idle():
    layouts = nearest(ParallelLayout(tensor=6), 7, lambda layout: layout.tensor == 1 and layout.cfg == 1)
    assert [layout.ranks for layout in layouts] == [6, 6, 6]
    assert nearest(ParallelLayout(tensor=6), 7, lambda layout: layout.ranks == 1) == [ParallelLayout()]
