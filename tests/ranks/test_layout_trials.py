"""Runs that try layouts in their first steps: each step is exact, and all ranks move alike."""

from dataclasses import replace

import pytest

from parallel_backend.engine.layout_trial import CALLS, LayoutTrial
from parallel_backend.engine.planned import Planned
from parallel_backend.errors import NoRoom
from parallel_backend.layout.parallel_layout import ParallelLayout
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_runs import check, inputs, run_of, step
from tests.support import tiny
from tests.support.weight_changes import Change

SIZES = tiny.Tiny(heads=3, layers=3, seed=21)
LAYOUTS = ("ulysses=3", "cfg=2", "", "ring=3")
"""The second and the third leave ranks idle, which join again."""
KEPT: list[tuple[str, dict[str, float]]] = []
"""On a rank, what has been kept since ``plan_by``."""


def plan_by(rank, texts, seconds):
    """Let a rank's engine try layouts that take these seconds. An empty text is one rank."""
    mine = driver.engine(rank)
    layouts = [ParallelLayout.parse(text) for text in texts]
    KEPT.clear()

    class Known(dict[ParallelLayout, float]):
        """Times of a machine where each layout takes what the test says."""

        def __setitem__(self, layout, taken):
            super().__setitem__(layout, taken if taken == float("inf") else seconds[layouts.index(layout)])

    class Notes:
        def note(self, seconds, trying):
            pass

        def settle(self, layout, found):
            KEPT.append((str(layout), {str(each): found[each] for each in found}))
            mine.planner = lambda *_: Planned(layout=layout, reason="known")
            return "tried"

    known = Known()
    planned = Planned(layout=layouts[0], reason="", trial=lambda: LayoutTrial(layouts, known, Notes()))
    mine.planner = lambda *_: planned


def settled(rank):
    """What the rank's engine has kept, which no longer plans."""
    driver.engine(rank).planner, driver.engine(rank)._speeds = None, ()
    return list(KEPT)


def without_room(rank, text):
    """Refuse a layout on rank 0 as if it had no room."""
    mine = driver.engine(rank)
    get = mine._meshes.get

    def refusing(layout):
        found = get(layout)
        if str(layout) == text and found is not None:
            raise NoRoom("no room")
        return found

    mine._meshes.get = refusing  # type: ignore[method-assign]


def with_room(rank):
    del driver.engine(rank)._meshes.get


@pytest.fixture
def planned(pools):
    """``planned(texts, seconds)`` sets what all ranks try."""
    yield lambda texts, seconds: pools(3).run(plan_by, texts, seconds)
    pools(3).run(settled)


@pytest.fixture
def path(checkpoints):
    return checkpoints(heads=3, layers=3, seed=21)


def asked(path, case):
    message, _ = requests.forward(requests.spec(path, None, ranks=3), case)
    return replace(message, model=replace(message.model, mode="fastest"))


@pytest.mark.parametrize("best", [1, 2, 3])
def test_steps_on_one_connection_are_exact_while_ranks_come_and_go(pools, path, planned, best):
    case = Case(seed=best)  # another text, and so another run
    planned(LAYOUTS, [1.0, *(0.5 if place == best else 2.0 for place in (1, 2, 3))])
    count = len(LAYOUTS) * CALLS + 2
    found = pools(3).run(run_of, replace(asked(path, case), steps=True), [inputs(case, n) for n in range(count)])
    assert len(found[0]["answers"]) == count
    for number, tensors in enumerate(found[0]["answers"]):
        check([{"tensors": tensors}], case, number)
    kept = pools(3).run(settled)
    assert [each[0][0] for each in kept] == [str(ParallelLayout.parse(LAYOUTS[best]))] * 3


def test_steps_that_are_requests_go_on_over_short_runs(pools, path, planned):
    """Each text is a run of its own, and an unload may come between them."""
    case = Case(seed=10)
    planned(LAYOUTS[:3], [1.0, 0.5, 2.0])
    for run in range(4):
        given = replace(case, seed=case.seed + run)
        for number in range(4):
            answers = pools(3).run(step, asked(path, given), inputs(given, number))
            check(answers, given, number)
    kept = pools(3).run(settled)
    assert [[layout for layout, _ in each] for each in kept] == [["cfg=2"]] * 3


def test_a_layout_without_room_is_left_out(pools, path, planned):
    case = Case(seed=20)
    planned(LAYOUTS[:3], [1.0, 0.1, 0.5])
    pools(3).run(without_room, "cfg=2")
    try:
        found = pools(3).run(run_of, replace(asked(path, case), steps=True), [inputs(case, n) for n in range(8)])
    finally:
        pools(3).run(with_room)
    for number, tensors in enumerate(found[0]["answers"]):
        check([{"tensors": tensors}], case, number)
    one = str(ParallelLayout())
    assert pools(3).run(settled) == [[(one, {"ulysses=3": 1.0, one: 0.5})]] * 3


def test_what_is_refused_at_first_is_refused_on_ranks_without_a_part_too(pools, path, planned):
    """The first layout leaves a rank idle, and what earlier runs found lets it move at once."""
    case = Case(seed=40)
    planned(("cfg=2", "", "ulysses=3"), [1.0, 0.5, 2.0])
    for number in range(4):
        check(pools(3).run(step, asked(path, case), inputs(case, number)), case, number)
    other = replace(case, seed=41)  # another run, since its text is another one
    bad = inputs(other, 0)
    bad["0.hidden_states"] = bad["0.hidden_states"] * float("nan")
    refused = pools(3).run(step, asked(path, other), bad)
    assert all("NaN" in text for text in refused)
    check(pools(3).run(step, asked(path, other), inputs(other, 1)), other, 1)


def test_loras_move_along(pools, path, planned, tmp_path):
    case = Case(seed=30)
    lora = Change.write(tmp_path, tiny.transformer(SIZES), seed=5, rank=2, strength=0.6).file
    message = replace(asked(path, case), adapters=((lora,), ()))
    alone = replace(message, model=replace(message.model, layout=ParallelLayout(), mode=""))
    planned(LAYOUTS, [1.0, 2.0, 2.0, 0.5])
    for number in range(len(LAYOUTS) * CALLS + 1):
        answers = pools(3).run(step, message, inputs(case, number))
        if number % CALLS == 1 or number == len(LAYOUTS) * CALLS:
            wanted = pools(3).run(step, alone, inputs(case, number))
            for branch in "01":
                both = (each[0]["tensors"][branch] for each in (answers, wanted))
                assert requests.relative_error(*both) <= 1e-5
    assert pools(3).run(settled)[0][0][0] == "ring=3"
