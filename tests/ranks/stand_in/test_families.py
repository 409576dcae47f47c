"""Every family in every layout on stand-in GPUs: nothing that CUDA or NCCL refuses, and nothing that hangs."""

import pytest

from lab.synchronisations import PAGE, numbers
from parallel_backend.families.registry import FAMILIES, family_of
from tests.ranks.stand_in.first_variants import FIRSTS
from tests.support.stand_in.requests import FEW, HYBRID, LAYOUTS, WITHIN_FRAMES

COUNTS = numbers(PAGE.read_text(encoding="utf-8"))


def spread(cases):
    """Every family with every case, of which a third, with each family and each case, run without ``-m long``."""
    return [
        pytest.param(family, case, marks=[] if (i + j) % 3 == 0 else [pytest.mark.long])
        for i, family in enumerate(FIRSTS)
        for j, case in enumerate(cases)
    ]


def exact(cases):
    """Leave out stale patches of the families that predict picture and sound together, which refuse them."""
    several = {family for family, (class_name, _) in FIRSTS.items() if len(family_of(class_name).latents) > 1}
    return [case for case in cases if case.values[0] not in several or "stale" not in case.values[1]]


@pytest.mark.parametrize(("family", "layout"), exact(spread(LAYOUTS)))
@pytest.mark.daily(10)
def test_loop_and_forward(check, small, layout, family):
    answers = check(small(family).loop(layout, texts_differ=layout == HYBRID))
    if "pipe" not in layout:  # which prepares each patch when it first streams
        _, of_a_step = COUNTS[f"{family} {FIRSTS[family][1]}"]
        waits = [wait for wait in answers[0].notes.part if "rank_speeds" not in wait.where]  # once for all requests
        assert len(waits) <= of_a_step, waits
    if "stale" not in layout:  # a single call is exact, as in the layout without it
        check(small(family).forward(layout))


@pytest.mark.parametrize("layout", WITHIN_FRAMES)
@pytest.mark.parametrize("family", [family for family in FIRSTS if FAMILIES[FIRSTS[family][0]].within_frames])
@pytest.mark.daily(2)
def test_whole_frames(check, small, layout, family):
    check(small(family).loop(layout))
    check(small(family).forward(layout))


@pytest.mark.parametrize(("family", "case"), spread(FEW))
@pytest.mark.daily(5)
def test_ranks_without_tokens(check, small, family, case):
    layout, text = case
    check(small(family).forward(layout, text=text))
