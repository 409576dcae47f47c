"""The times of steps, and the last trouble."""

from dataclasses import replace

import pytest
from any_folder_name.nodes.backend import noted_steps, session
from any_folder_name.nodes.backend.activity import HISTORY, Activity, named
from any_folder_name.nodes.backend.progress_text import duration, shown_progress
from any_folder_name.parallel_backend.errors import OutOfMemory
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Forward, Progress
from any_folder_name.parallel_backend.protocol.model_spec import Devices, ModelSpec
from any_folder_name.parallel_backend.protocol.origin import MAX_NAME, Origin

pytestmark = pytest.mark.newest
NODE, OTHER = Origin(prompt="p", node="3"), Origin(prompt="p", node="4")


def activity(*times: float) -> Activity:
    clock = iter(times)
    return Activity(clock=lambda: next(clock))


def test_the_time_between_two_steps_of_a_node_counts() -> None:
    noted = activity(0.0, 2.0, 3.0, 6.0, 16.0)
    for done in (0, 1, 1, 2, 4):
        noted.progressed(NODE, done, 8)
    assert noted.steps.seconds == (2.0, 4.0, 5.0)  # a second call of the same step is none
    assert (noted.steps.done, noted.steps.total, noted.steps.origin) == (4, 8, NODE)
    assert noted.steps.left == 4 * 4.0


def test_another_node_begins_anew_and_the_same_one_goes_on() -> None:
    noted = activity(0.0, 1.0, 100.0, 103.0, 200.0, 201.0)
    noted.progressed(NODE, 0, 2)
    noted.progressed(NODE, 1, 2)
    noted.progressed(OTHER, 0, 2)
    assert noted.steps.seconds == ()
    assert noted.steps.left is None
    noted.progressed(OTHER, 1, 2)
    noted.progressed(OTHER, 0, 2)  # a second run: the pause between them is no step
    assert noted.steps.seconds == (3.0,)
    noted.progressed(OTHER, 1, 2)
    assert noted.steps.seconds == (3.0, 1.0)


def test_the_history_is_bounded() -> None:
    noted = Activity()
    for done in range(HISTORY + 20):
        noted.progressed(NODE, done, 1000)
    assert len(noted.steps.seconds) == HISTORY


def test_the_last_trouble_is_kept_with_its_kind() -> None:
    noted = Activity()
    assert noted.trouble is None
    noted.failed(NODE, OutOfMemory("rank 1 is full: use fewer pixels"))
    assert noted.trouble is not None
    assert (noted.trouble.text, noted.trouble.code) == ("rank 1 is full: use fewer pixels", "out_of_memory")
    noted.recovered(None, "asking again")
    assert (noted.trouble.text, noted.trouble.code, noted.trouble.origin) == ("asking again", "", None)


def test_a_prompt_with_any_name_has_an_origin() -> None:
    assert named("a\nb", "x" * 1000) == Origin(prompt="ab", node="x" * MAX_NAME)


@pytest.fixture
def _session():
    previous = session.current()
    session.use(session.Session())
    yield
    session.use(previous)


@pytest.mark.usefixtures("_session")
def test_the_time_left_is_that_of_the_same_sampling_only() -> None:
    noted = session.current().part(Activity)
    noted._clock = iter([0.0, 2.0, 4.0, 50.0, 51.0]).__next__
    assert noted_steps.time_left(NODE, 0, 10) == ""
    for done in range(3):
        noted.progressed(NODE, done, 10)
    assert noted_steps.time_left(NODE, 3, 10) == ", about 14 s left"
    assert noted_steps.time_left(NODE, 10, 10) == ""  # decoding or the next prompt follows
    assert noted_steps.time_left(OTHER, 3, 10) == ""
    assert noted_steps.time_left(NODE, 3, 20) == ""
    shown: list[str] = []
    progressed = shown_progress("sampling", shown.append, None, lambda *at: noted_steps.time_left(NODE, *at))
    progressed(Progress(phase="sampling", value=4, total=10, note="slowly"), {})
    assert shown == ["sampling 4/10, about 12 s left (slowly)"]


def test_times_are_said_as_they_are_read() -> None:
    assert [duration(each) for each in (0.2, 12.4, 89.0, 90.0, 3000.0, 5400.0, 9000.0)] == [
        "0 s", "12 s", "89 s", "2 min", "50 min", "1.5 h", "2.5 h",
    ]  # fmt: skip


@pytest.mark.usefixtures("_session")
def test_the_reason_of_a_plan_is_that_of_the_model_that_samples() -> None:
    spec = ModelSpec(path="/m", devices=Devices(kind="cpu", indices=(0,)), mode="auto")
    planned, explicit, another, fitted = (
        Forward(model=replace(spec, **change), branches=1)
        for change in ({}, {"mode": ""}, {"path": "/other"}, {"layout": ParallelLayout()})
    )
    noted, passed = session.current().part(Activity), list[str]()
    shown = noted_steps.noted_plan(planned, lambda progress, _: passed.append(progress.phase))
    shown(Progress(phase="planning", value=0, total=1), {})
    assert noted.reason == ""
    shown(Progress(phase="planning", value=1, total=1, note="two GPUs: 1.9 times as fast"), {})
    shown(Progress(phase="loading", value=1, total=1, note="read again"), {})
    assert noted.reason == "two GPUs: 1.9 times as fast"
    noted_steps.noted_plan(planned, shown)
    assert noted.reason == "two GPUs: 1.9 times as fast"
    for other in (explicit, another, fitted):
        noted_steps.noted_plan(other, shown)
        assert noted.reason == ""
        noted_steps.noted_plan(planned, shown)
        assert noted.reason == "two GPUs: 1.9 times as fast"
    assert passed == ["planning", "planning", "loading"]
