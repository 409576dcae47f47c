"""What is said of a layout that does not fit."""

import re

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.suggestions import check_fits, nearest


def named(sentence):
    """The layouts that a refusal says would work."""
    return re.findall(r'"([^"]+)"', sentence.partition("would work: ")[2])


def test_too_few_ranks_names_what_would_fit():
    with pytest.raises(InvalidRequest, match=r"needs 4 ranks and there are 3; ") as refused:
        check_fits(ParallelLayout(cfg=2, ulysses=2), 3)
    assert named(str(refused.value)) == ["ulysses=3", "ulysses=2", "cfg=2"]
    check_fits(ParallelLayout(cfg=2, ulysses=2), 4)


@pytest.mark.parametrize("wanted", ["cfg=2 ulysses=4", "tensor=8", "data=2 tensor=4", "ring=8 shard_weights"])
@pytest.mark.parametrize("ranks", [1, 3, 5, 7])
def test_what_is_named_fits_and_asks_for_no_more(wanted, ranks):
    asked = ParallelLayout.parse(wanted)
    with pytest.raises(InvalidRequest) as refused:
        check_fits(asked, ranks)
    layouts = [ParallelLayout.parse(text) for text in named(str(refused.value))]
    assert layouts
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        check_fits(layout, ranks)
        assert all(layout.degrees[axis] <= asked.degrees[axis] for axis in ("data", "cfg", "tensor"))
    assert layouts[0].shard_weights == (asked.shard_weights and ranks > 1)


def test_nearest_are_those_that_work_with_the_fewest_idle_ranks():
    found = nearest(ParallelLayout(tensor=6), 7, lambda layout: layout.tensor == 1 and layout.cfg == 1)
    assert [layout.ranks for layout in found] == [6, 6, 6]
    assert nearest(ParallelLayout(tensor=6), 7, lambda layout: layout.ranks == 1) == [ParallelLayout()]
