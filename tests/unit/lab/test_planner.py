"""The lab's comparisons of the planner: the published rows, and their halves."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lab.bench.ranks.cases import MODELS, Case
from lab.planner import cells
from lab.planner.cells import _tried
from lab.planner.published import FILE, Row, compared, read, summary
from lab.planner.regret import Cell, Cells
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.hardware.shipped import KERNELS, MACHINES
from parallel_backend.planner.models import PUBLISHED, Model
from parallel_backend.protocol.model_spec import Devices, ModelSpec

CASE = Case(family="flux", tokens=16, text_tokens=8, branches=1)


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
    assert 'takes "a", 0 % over the best; without a plan' in replace(both, settled="").describe()
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
    ("times", "loop", "settled"),
    [
        ((1.0, 0.5, 2.0, 0.1), False, "ulysses=2"), ((1.0, 0.98, 2.0, 0.1), False, "one rank"),
        ((1.0, None, None, 0.1), False, "one rank"), ((1.0, 0.5, 2.0, 0.1), True, ""),
    ],
)  # fmt: skip
def test_trials_settle_on_the_fastest_of_the_choice_and_its_rivals(monkeypatch, times, loop, settled):
    """The ranks' own loop tries nothing."""
    one, *others = map(ParallelLayout.parse, ("one rank", "ulysses=2", "ring=2"))
    monkeypatch.setattr(cells, "rivals", lambda _: tuple(others))
    made: Any = SimpleNamespace(chosen=SimpleNamespace(layout=one), prompt=SimpleNamespace(loop=loop))
    layouts = (one, *others, ParallelLayout(tensor=2))
    timed = [
        Cell(layout=str(each), predicted=1.0, measured=taken)
        for each, taken in zip(layouts, times, strict=True)
        if taken
    ]
    assert cells._settled(made, timed) == settled


@pytest.mark.parametrize(("steps", "names"), [(0, {"hidden_states", "timestep"}), (4, set())])
def test_a_cell_is_a_forward_or_a_sampling_of_so_many_steps(steps, names):
    client, inputs = mock.Mock(), [dict(CASE.inputs()) for _ in range(2)]
    client.call.return_value = {"seconds": torch.tensor(1.5)}
    spec = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0,)), layout=ParallelLayout())
    assert cells._call(client, spec, inputs, steps)() == 1.5
    message, tensors = client.call.call_args.args
    changing = {"hidden_states", "timestep"}
    assert {name for name in changing if f"1.{name}" in tensors} == names
    assert (message.branches, message.measure, "1.encoder_hidden_states" in tensors) == (2, "seconds", True)
    if steps:
        assert (tensors["x"].shape, len(tensors["sigmas"])) == (inputs[0]["hidden_states"].shape, steps + 1)


def test_approximate_layouts_are_planned_for_samplings_alone():
    inputs = dict(CASE.inputs())
    model = Model(name="flux", class_name="FluxTransformer2DModel", config=MODELS["flux"].config, path=None)
    assert [cells._prompt(model, inputs, guided=False, steps=steps).loop for steps in (0, 4)] == [False, True]
    with pytest.raises(InvalidRequest, match="--steps -1: a number of steps"):
        cells.run(Namespace(rounds=1, batch=1, steps=-1))
