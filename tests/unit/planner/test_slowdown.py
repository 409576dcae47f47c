"""Ranks that have become slower since they were measured: when that is looked at, and what follows."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.distributed.mesh import Axis
from parallel_backend.layout.modes import APPROXIMATE
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner import agreed, planning, slowdown
from parallel_backend.planner.choosing import Chooser
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware, Link
from parallel_backend.planner.models import find
from parallel_backend.planner.planning import plan
from parallel_backend.planner.request import prompt
from parallel_backend.planner.slowdown import EVERY, Watch, as_now, changes
from parallel_backend.protocol.model_spec import Devices, ModelSpec

WORLD = Axis(name="all", group=None, ranks=(0, 1), index=0, gloo=True)
CARD = shipped.card("RTX 4090")
PAIR = Hardware(
    name="two cards", devices=(CARD, CARD), links=(Link(devices=(0, 1), bandwidth=1e12, latency=1e-9),), paces=(50, 40)
)
MODEL = ModelSpec(path="/", stamp="1", mode="fastest", devices=Devices(kind="cuda", indices=(0, 1)))


class Ranks:
    """Stand for two ranks and a clock."""

    def __init__(self, *paces):
        self.paces, self.measured, self.now = list(paces), 0, 0.0

    def measure(self, device, world_size):
        self.measured += 1
        return self.paces.pop(0) if len(self.paces) > 1 else self.paces[0]

    def watch(self):
        return Watch(self.measure, lambda: self.now)


@pytest.fixture(autouse=True)
def rank_0_decides(monkeypatch):
    monkeypatch.setattr(slowdown, "agree", lambda value, axis: value)


def speeds(watch, hardware=PAIR, asker=None):
    return watch.speeds(hardware, WORLD, torch.device("cpu"), asker)


@pytest.mark.parametrize(
    ("paces", "launch", "expected"),
    [
        ((50, 40), 6e-6, (1, 1)),
        ((50, 36), 6e-6, (1, 1)),  # within what measurements vary by
        ((25, 20), 6e-6, (1, 1)),  # all alike
        ((50, 20), 6e-6, (1, 0.5)),
        ((50, 80), 6e-6, (1, 2)),  # it was slow when it was measured
        ((25, 10), 6e-6, (0.5, 0.2)),
        ((50, 1), 6e-6, (1, 0.1)),
        ((50, 28), 6e-6, (1, 0.7)),
        ((50, 28), 0.0, (1, 1)),  # cores vary by more
    ],
)
def test_speeds_are_relative_to_what_was_measured(paces, launch, expected):
    assert changes(replace(PAIR, launch=launch), paces) == expected


def test_it_measures_once_in_a_while():
    ranks = Ranks((50, 40))
    watch = ranks.watch()
    assert [speeds(watch) for _ in range(3)] == [(1, 1)] * 3
    assert ranks.measured == 1
    ranks.now = EVERY + 1
    ranks.paces = [(50, 20)]
    assert speeds(watch) == (1, 0.5)
    assert ranks.measured == 3  # a difference is measured twice


def test_what_is_disturbed_once_is_not_slow():
    assert speeds(Ranks((50, 20), (25, 40)).watch()) == (1, 1)


def test_small_differences_are_none():
    """Otherwise plans would come and go."""
    ranks = Ranks((50, 34.5))
    watch = ranks.watch()
    for pace in (34.5, 33.5, 34.5):
        ranks.paces, ranks.now = [(50, pace)], ranks.now + EVERY + 1
        assert speeds(watch) == (1, 1)
    ranks.paces, ranks.now = [(50, 30)], ranks.now + EVERY + 1
    assert speeds(watch) == (1, 0.8)


def test_it_does_not_look_within_a_prompt():
    ranks = Ranks((50, 40))
    watch = ranks.watch()
    assert speeds(watch, asker="first") == (1, 1)
    ranks.paces, ranks.now = [(50, 20)], EVERY + 1
    assert speeds(watch, asker="first") == (1, 1)
    assert speeds(watch, asker="second") == (1, 0.5)


def test_a_device_without_room_changes_nothing():
    ranks = Ranks((50, 0))
    watch = ranks.watch()
    assert speeds(watch) == (1, 1)
    assert ranks.measured == 1
    ranks.paces, ranks.now = [(50, 20)], EVERY + 1
    assert speeds(watch) == (1, 0.5)
    ranks.paces, ranks.now = [(50, 0)], 2 * EVERY + 2
    assert speeds(watch) == (1, 0.5)
    watch.note(())  # nor one that had none for a probe
    assert speeds(watch) == (1, 0.5)


def test_what_a_probe_has_just_found_is_not_measured_again():
    ranks = Ranks((50, 20))
    watch = ranks.watch()
    watch.note((50, 40))
    assert speeds(watch) == (1, 1)
    assert ranks.measured == 0


def test_without_paces_nothing_is_measured():
    ranks = Ranks((50, 20))
    assert speeds(ranks.watch(), replace(PAIR, paces=())) == (1, 1)
    assert ranks.measured == 0


def test_the_slower_device_is_planned_as_such():
    asked = prompt(find("wan2.1-t2v-1.3b"), "480x480x17")
    assert not plan(asked, PAIR).chosen.layout.balance
    assert plan(asked, as_now(PAIR, (1, 0.5))).chosen.layout.balance == (1, 0.5)
    curves = replace(CARD, layers=((1.0, 2.0),), attends=((1e9, 1.0),))
    slow = as_now(replace(PAIR, devices=(curves, curves)), (1, 0.5)).devices[1]
    assert (slow.layers, slow.attends) == (((1.0, 4.0),), ((1e9, 2.0),))


def test_no_layout_that_splits_weights_is_chosen_where_they_have_to_stay_whole():
    """Also where without a plan weights are split."""
    model = find("wan2.1-t2v-14b")
    cards = tuple(replace(CARD, memory=2e10) for _ in range(2))
    pair, asked = replace(PAIR, devices=cards, host_memory=1e12), prompt(model, "480x480x17")
    free = plan(asked, pair)
    assert free.rule.layout.splits_weights
    assert any(each.layout.splits_weights for each in free.predictions)
    whole = plan(asked, pair, whole=True)
    assert not any(each.layout.splits_weights for each in (whole.chosen, *whole.predictions))


def test_no_approximate_layout_is_chosen_in_place_of_an_exact_one():
    asked, slow = prompt(find("wan2.1-t2v-1.3b"), "480x480x17"), as_now(PAIR, (1, 0.5))
    assert any(each.layout.approximation for each in plan(asked, slow, mode=APPROXIMATE).predictions)
    assert not any(each.layout.approximation for each in plan(asked, slow, mode=APPROXIMATE, whole=True).predictions)


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Return the plan for two ranks whose pace may have changed, with its key and the one from before."""
    monkeypatch.setattr(agreed, "gather_texts", lambda text, axis: [text])

    def found(paces, model=MODEL):
        made = agreed.agree(prompt(find("wan2.1-t2v-1.3b"), "480x480x17"), PAIR, model, WORLD)
        chooser = Chooser(tmp_path, Ranks(paces).watch())
        return made, *chooser._as_now("key", made, model, WORLD, torch.device("cpu"), None)

    return found


@pytest.mark.parametrize("mode", ["fastest", "auto"])
def test_a_slower_rank_changes_the_plan_and_the_reason_says_so(chosen, mode):
    made, key, now = chosen((50, 20), replace(MODEL, mode=mode))
    assert key == ("key", (1, 0.5))
    assert now.layouts[0].balance == (1, 0.5)
    assert now.changed == "now rank 1 at 50 % of the speed that was measured: "
    assert now.reason.startswith(now.changed)
    assert not made.changed


def test_a_plan_stays_while_the_ranks_are_as_fast(chosen):
    made, key, now = chosen((50, 40))
    assert (key, now) == ("key", made)


def test_a_compiled_model_stays_as_it_is(chosen):
    made, key, now = chosen((50, 20), replace(MODEL, compile="blocks"))
    assert (key, now) == ("key", made)


def test_a_slower_rank_that_is_idle_changes_nothing(chosen, monkeypatch):
    agree = agreed.agree
    monkeypatch.setattr(
        agreed, "agree", lambda *given, **more: replace(agree(*given, **more), layouts=(ParallelLayout(),))
    )
    made, key, now = chosen((50, 20))
    assert (key, now) == ("key", made)
    assert chosen((50, 80))[1] == ("key", (1, 2))


@pytest.mark.parametrize("text", ["tensor=2", "pipe=2 patches=1", "ring=2 stale=previous"])
def test_layouts_that_split_weights_or_are_approximate_stay(chosen, monkeypatch, text):
    one = ParallelLayout.parse(text)
    agree = agreed.agree
    monkeypatch.setattr(agreed, "agree", lambda *given, **more: replace(agree(*given, **more), layouts=(one,)))
    made, key, now = chosen((50, 20))
    assert (key, now) == ("key", made)


@pytest.mark.parametrize(
    ("memory", "expected"), [(CARD.memory, "ring=2 shard_weights balance=1:0.5"), (1.0, "ring=2 shard_weights")]
)
def test_ranks_that_shard_weights_share_tokens_anew(chosen, monkeypatch, memory, expected):
    """Their parts of the weights are equal in any case, so nothing is read."""
    cards = tuple(replace(CARD, memory=memory) for _ in range(2))
    sharded, agree = replace(PAIR, devices=cards), agreed.agree
    layouts = (ParallelLayout(ring=2, shard_weights=True),)
    monkeypatch.setattr(
        agreed, "agree", lambda *given, **more: replace(agree(*given, **more), layouts=layouts, measured=sharded)
    )
    made, key, now = chosen((50, 20))
    assert key == ("key", (1, 0.5))
    assert str(now.layouts[0]) == expected
    assert now.reason.startswith("now rank 1 at 50 % of the speed that was measured: ")
    assert ('"ring=2 shard_weights balance=1:0.5" instead; before, ' in now.reason) == (memory > 1)
    assert made.layouts == layouts
    assert now.hardware == as_now(sharded, (1, 0.5))  # by which a VAE shares rows


def test_equal_shares_stay_where_those_by_speed_are_no_faster(monkeypatch):
    asked, layout = prompt(find("wan2.1-t2v-1.3b"), "480x480x17"), ParallelLayout(ring=2, shard_weights=True)
    assert planning.rebalanced(asked, layout, as_now(PAIR, (1, 0.5))).balance == (1, 0.5)
    unequal = replace(layout, balance=(1, 0.5))
    assert planning.rebalanced(asked, unequal, PAIR) == layout
    monkeypatch.setattr(planning, "by_speed", lambda *_: replace(layout, balance=(0.2, 1)))
    assert planning.rebalanced(asked, layout, as_now(PAIR, (1, 0.5))) == layout
