"""Every family in every layout on stand-in GPUs: nothing that CUDA or NCCL refuses, and nothing that hangs."""

import pytest

from tests.ranks.stand_in.first_variants import FIRSTS
from tests.support.stand_in.requests import FEW, HYBRID, LAYOUTS


@pytest.mark.parametrize("family", FIRSTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loop_and_forward(check, small, layout, family):
    check(small(family).loop(layout, texts_differ=layout == HYBRID))
    if "stale" not in layout:  # a single call is exact, as in the layout without it
        check(small(family).forward(layout))


@pytest.mark.parametrize("family", FIRSTS)
@pytest.mark.parametrize(("layout", "text"), FEW)
def test_ranks_without_tokens(check, small, layout, text, family):
    check(small(family).forward(layout, text=text))
