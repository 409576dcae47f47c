"""Which layout stands for the rule's where a plan prefers another one of whole weights."""

from unittest import mock

import pytest
import torch

from parallel_backend.distributed.world import world
from parallel_backend.engine import automatic_layout
from parallel_backend.engine.agreements import Agreements
from parallel_backend.engine.automatic_layout import fit
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.models import find
from parallel_backend.planner.request import prompt
from parallel_backend.protocol.model_spec import Devices, ModelSpec

RULE, PLANNED, SPLIT = map(ParallelLayout.parse, ("cfg=2", "ulysses=2", "ulysses=2 shard_weights"))
SLOWER = ParallelLayout.parse("ulysses=2 balance=1:0.5")
MODEL = ModelSpec(path="/", stamp="1", devices=Devices(kind="cpu", indices=(0, 1)))


@pytest.fixture
def fitted(monkeypatch):
    """Fit requests one after another, whose tensors take ``rule``, ``planned`` or ``slower`` of a room of 7."""
    agreements, works = Agreements(world=world(0, 1)), dict[ParallelLayout, int]()
    components = mock.Mock(dtype=torch.float32)
    monkeypatch.setattr(automatic_layout, "_work", lambda plan, *_: works[plan.layout])
    monkeypatch.setattr(automatic_layout, "_takes_over", lambda *_: False)
    monkeypatch.setattr(automatic_layout, "claims_of_all", lambda *_: [])
    monkeypatch.setattr(
        automatic_layout, "choose", lambda plan, *_: plan.layout if works[plan.layout] <= 7 else SPLIT
    )  # fmt: skip
    plan = prompt(find("wan2.1-t2v-1.3b"), "480x480x17").plan(RULE)

    def fitting(rule, planned=0, *, slower=0, adapt=True):
        works.update({RULE: rule, PLANNED: planned, SLOWER: slower, SPLIT: 0})
        roomy = SLOWER if slower else PLANNED if planned else None
        return fit(plan, components, MODEL, agreements, adapt=adapt, roomy=roomy).layout

    return fitting


def test_what_is_planned_is_taken_where_it_fits(fitted):
    assert fitted(10, 5) == PLANNED
    assert fitted(10, 5, adapt=False) == PLANNED


def test_what_fits_as_planned_may_not_fit_by_the_rule(fitted):
    assert fitted(10, 5) == PLANNED
    assert fitted(10) == SPLIT


def test_what_fits_by_the_rule_may_not_fit_as_planned(fitted):
    for _ in range(2):
        assert fitted(5, 10) == RULE


def test_sizes_that_take_turns_keep_split_weights(fitted):
    assert fitted(10, 10) == SPLIT
    assert [fitted(4, 4), fitted(4), fitted(10, 10)] == [SPLIT] * 3


def test_a_first_try_does_not_look_for_room(fitted):
    assert fitted(10, 10, adapt=False) == PLANNED
    assert fitted(10, adapt=False) == RULE


def test_whole_weights_stay_where_shares_by_speed_have_no_room(fitted):
    """Neither the rule's layout has, and splitting weights would read them anew."""
    assert [fitted(10, 5), fitted(10, 5, slower=8), fitted(10, 5)] == [PLANNED] * 3
    assert fitted(10, 6, slower=8) == SPLIT  # a larger picture
