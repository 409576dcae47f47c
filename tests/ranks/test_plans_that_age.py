"""Layouts that are planned again for another prompt, never within one, and ranks that look alike at their speeds."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.verify.vae.run import TOLERANCE, VaeCase, VaeComparison
from parallel_backend.engine import planned
from parallel_backend.engine.layout_trial import CALLS, LayoutTrial
from parallel_backend.engine.planned import LEAST_BYTES, Planned
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading.weight_source import WeightSource
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware, Link
from parallel_backend.planner.slowdown import EVERY, Watch
from parallel_backend.protocol.origin import Origin
from tests.ranks import driver
from tests.ranks.requests import Case
from tests.ranks.test_layout_trials import asked
from tests.ranks.test_layout_trials import settled as no_longer_planned
from tests.ranks.test_runs import check, inputs, step
from tests.ranks.test_runs import path as path  # a fixture

ASKED: list[object] = []
"""On a rank, who has asked for a plan."""
READ: list[Any] = []
"""On a rank, what reads weights, while nothing does."""


def plan_in_turn(rank, texts, holds):
    """Let a rank's engine plan another layout each time, also for a small model in ``auto``."""
    layouts = [ParallelLayout.parse(text) for text in texts]
    ASKED.clear()

    def planner(*given):
        ASKED.append(given[5])
        return Planned(layout=layouts[(len(ASKED) - 1) % len(layouts)], reason="planned", holds=holds)

    driver.engine(rank).planner, planned.LEAST_BYTES = planner, 0


def settled(rank):
    """Let a rank's engine no longer plan."""
    no_longer_planned(rank)
    planned.LEAST_BYTES = LEAST_BYTES


def who_asked(rank):
    return list(ASKED)


@pytest.mark.parametrize(("holds", "mode"), [(0.0, "fastest"), (0.0, "auto"), (1e9, "auto")])
def test_another_prompt_is_planned_again_when_a_plan_is_old(pools, path, holds, mode):
    """The same prompt never is, and each step is exact."""
    case = Case(seed=30)
    first, second = Origin(prompt="first", node="1"), Origin(prompt="second", node="1")
    pools(3).run(plan_in_turn, ("ulysses=3", "ring=3"), holds)
    repeats = []
    try:
        for number, origin in enumerate((first, first, second, second)):
            message = asked(path, case)
            message = replace(message, origin=origin, model=replace(message.model, mode=mode))
            answers = pools(3).run(step, message, inputs(case, number))
            check(answers, case, number)
            repeats.append({answer["repeats"] for answer in answers})
            time.sleep(0.01)
        old = holds == 0
        assert repeats == [{False}, {True}, {not old}, {True}]
        assert pools(3).run(who_asked) == [[first, second] if old else [first]] * 3
    finally:
        pools(3).run(settled)


def read_nothing(rank, forbidden):
    """Let a rank fail where it reads weights, or read again."""
    if forbidden:
        READ.append(WeightSource.read)
        WeightSource.read = None  # type: ignore[method-assign,assignment]
    elif READ:
        WeightSource.read = READ.pop()  # type: ignore[method-assign]


def test_ranks_that_shard_weights_share_tokens_anew_without_reading(pools, path):
    case, layout = Case(seed=33), "ring=3 shard_weights"
    pools(3).run(plan_in_turn, (layout, f"{layout} balance=1:1:0.5"), 0.0)
    try:
        for number in range(2):
            message = replace(asked(path, case), origin=Origin(prompt=str(number), node="1"))
            check(pools(3).run(step, message, inputs(case, number)), case, number)
            if number == 0:
                pools(3).run(read_nothing, True)
            time.sleep(0.01)
        assert len(pools(3).run(who_asked)[0]) == 2
    finally:
        pools(3).run(read_nothing, False)
        pools(3).run(settled)


class _Notes:
    def note(self, seconds, trying):
        pass

    def settle(self, layout, seconds):
        return "tried"


def plan_with_a_trial(rank):
    """Let a rank's engine try two layouts each time it plans, and plan again for each prompt."""
    layouts = [ParallelLayout(ulysses=3), ParallelLayout(ring=3)]
    ASKED.clear()

    def planner(*given):
        ASKED.append(given[5])
        return Planned(layout=layouts[0], reason="", holds=0.0, trial=lambda: LayoutTrial(layouts, {}, _Notes()))

    driver.engine(rank).planner = planner


def test_a_trial_ends_before_its_run_is_planned_again(pools, path):
    case = Case(seed=31)
    pools(3).run(plan_with_a_trial)
    asked_by = []
    try:
        for number in range(2 * CALLS + 2):
            origin = Origin(prompt=str(number), node="1")
            answers = pools(3).run(step, replace(asked(path, case), origin=origin), inputs(case, number))
            check(answers, case, number)
            asked_by.append(len(pools(3).run(who_asked)[0]))
    finally:
        pools(3).run(settled)
    assert asked_by == [1] * (2 * CALLS + 1) + [2]


def plan_with_speeds(rank, speeds):
    driver.engine(rank).planner = lambda *_: Planned(layout=ParallelLayout(ulysses=3), reason="", speeds=speeds)


def test_a_vae_shares_rows_by_the_speeds_of_the_last_plan(pools, path, tmp_path):
    """Also the VAE of a loader of its own, which has no mode."""
    unlike = VaeComparison(VaeCase(kind="image", ranks=3, width=8, size=(17, 3), balance=(1.0, 1.0, 0.4)), tmp_path)
    even = VaeComparison(replace(unlike.asked, balance=()), tmp_path)
    assert even.formula() != unlike.formula()

    def check_rows(message, subject):
        got = pools(3).run(driver.handle, message, subject.given)[0]["tensors"]
        assert subject.error(got, subject.wanted()) <= TOLERANCE
        assert tuple(got["sent_bytes"].tolist()) == subject.formula()

    check_rows(even.message, even)
    pools(3).run(plan_with_speeds, (1.0, 1.0, 0.4))
    try:
        check(pools(3).run(step, asked(path, Case(seed=32)), inputs(Case(seed=32), 0)), Case(seed=32), 0)
        check_rows(even.message, unlike)
        check_rows(unlike.message, unlike)
    finally:
        pools(3).run(settled)


def look(rank, paces):
    """Look at the ranks' speeds again and again, by a clock that is the rank's own."""
    world, measured, now = driver.engine(rank)._agreements.world, list[int](), [1000.0 * rank]

    def measure(device, world_size):
        measured.append(len(measured))
        return paces[min(len(measured), len(paces)) - 1]

    watch, found = Watch(measure, lambda: now[0]), []
    card = shipped.card("RTX 4090")
    links = (Link(devices=(0, 1, 2), bandwidth=1e12, latency=1e-9),)
    hardware = Hardware(name="three", devices=(card,) * 3, links=links, paces=(10, 10, 10))
    for _ in range(4):
        found.append((watch.speeds(hardware, world, torch.device("cpu")), len(measured)))
        now[0] += EVERY * (0.6 if rank == 0 else 0.0 if rank == 1 else 5.0)
    return found


def test_ranks_look_alike_at_their_speeds_whatever_their_clocks_say(pools):
    found = pools(3).run(look, [(10, 10, 10), (10, 10, 5)])
    assert found[0] == found[1] == found[2]
    assert found[0] == [((1, 1, 1), 1), ((1, 1, 1), 1), ((1, 1, 0.5), 3), ((1, 1, 0.5), 3)]
