"""The lab's comparisons of the planner: the published rows, and their halves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.planner import cells
from lab.planner.cells import Cell, Cells, _tried
from lab.planner.published import FILE, Row, compared, read, summary
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.hardware.shipped import KERNELS, MACHINES
from parallel_backend.planner.models import PUBLISHED


def test_every_second_row_is_held_out():
    assert [row["held_out"] for row in read()] == [bool(index % 2) for index in range(len(read()))]
    assert len(read()) >= 20


@pytest.mark.parametrize("row", read(), ids=lambda row: f"{row['model']} {row['layout']}")
def test_rows_name_what_is_known_and_where_it_is_from(row):
    assert row["model"] in PUBLISHED
    assert row["hardware"] in MACHINES
    assert row["attention"] in KERNELS
    assert row["source"].startswith("https://")
    assert ParallelLayout.parse(row["layout"]).ranks > 1
    assert row["seconds_of_one"] > row["seconds"] > 0


def test_a_row_is_reproduced():
    (row,) = [each for each in read() if each["system"] == "buqi"]
    found = compared(row)
    assert found.published == pytest.approx(1.91, abs=0.005)
    assert abs(found.error) <= 0.2


def test_errors_are_summed_up():
    row: dict[str, Any] = {"what": "", "hardware": "", "layout": "", "held_out": True}
    rows = [Row(published=2.0, predicted=predicted, **row) for predicted in (2.0, 2.2, 4.0)]
    assert summary("held out", rows) == "held out: median error 10 %, 2 of 3 within 20 %"


def test_the_regret_of_a_choice_is_what_it_takes_over_the_best():
    cells = tuple(Cell(layout=name, predicted=1.0, measured=taken) for name, taken in (("a", 1.0), ("b", 1.5)))
    both = Cells(what="wan", cells=cells, chosen="a", settled="b", rule="b", probing=2.5)
    assert (both.regret("a"), both.regret("b")) == (0.0, 0.5)
    said = 'takes "a", 0 % over the best, and "b" when it has tried, 50 % over it; without a plan "b" is taken, 50 % '
    assert said in both.describe()
    assert (
        'takes "d", which was not timed beside the best, and "b" when it has tried, 50 % over it; without a plan "c" '
        "is taken, which was not timed beside it" in replace(both, chosen="d", rule="c").describe()
    )
    assert FILE.is_file()


def test_a_named_layout_is_timed_with_every_balance_and_beside_one_rank():
    texts = ("one rank", "ring=3", "ring=3 balance=1:1:0.4", "ulysses=3", "ring=3 shard_weights")
    fitting = [ParallelLayout.parse(text) for text in texts]
    assert _tried(fitting, [ParallelLayout(ring=3)]) == fitting[:3]
    assert _tried(fitting, []) == fitting


@pytest.mark.parametrize("text", ["tensor=3", "ring=3 balance=1:1:0.4"])
def test_a_named_layout_that_does_not_work_is_refused(text):
    fitting = [ParallelLayout(), ParallelLayout(ring=3)]
    with pytest.raises(InvalidRequest, match=f'--layout "{text}" does not work here; choices: "one rank", "ring=3"'):
        _tried(fitting, [ParallelLayout.parse(text)])


@pytest.mark.parametrize(
    ("times", "settled"),
    [((1.0, 0.5, 2.0, 0.1), "ulysses=2"), ((1.0, 0.98, 2.0, 0.1), "one rank"), ((1.0, None, None, 0.1), "one rank")],
)
def test_trials_settle_on_the_fastest_of_the_choice_and_its_rivals(monkeypatch, times, settled):
    one, *others = map(ParallelLayout.parse, ("one rank", "ulysses=2", "ring=2"))
    monkeypatch.setattr(cells, "rivals", lambda _: tuple(others))
    made: Any = SimpleNamespace(chosen=SimpleNamespace(layout=one))
    layouts = (one, *others, ParallelLayout(tensor=2))
    timed = [
        Cell(layout=str(each), predicted=1.0, measured=taken)
        for each, taken in zip(layouts, times, strict=True)
        if taken
    ]
    assert cells._settled(made, timed) == settled
