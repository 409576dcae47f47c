"""Which layout a step runs in while layouts are tried."""

import math
from typing import Any

import pytest

from parallel_backend.distributed.mesh import Axis
from parallel_backend.engine import layout_trial
from parallel_backend.engine.layout_trial import CALLS, LayoutTrial, fastest
from parallel_backend.layout.parallel_layout import ParallelLayout

ALONE = Axis(name="all", group=None, ranks=(0,), index=0, gloo=True)
A, B, C = (ParallelLayout.parse(text) for text in ("ulysses=2", "cfg=2", "ring=2"))


class Clock:
    """Stands for ``time``."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(layout_trial, "time", clock)
    return clock


class Run:
    """Takes steps as a run of steps does. The first one in a layout takes longer."""

    def __init__(self, clock: Clock, seconds: dict[ParallelLayout, float], known: dict[ParallelLayout, float]) -> None:
        self.clock, self.seconds, self.kept = clock, seconds, list[Any]()
        self.noted = list[Any]()
        self.trial = LayoutTrial([A, B, C], known, self)

    def note(self, seconds: Any, trying: ParallelLayout | None) -> None:
        self.noted.append((dict(seconds), trying))

    def settle(self, layout: ParallelLayout, seconds: Any) -> str:
        self.kept.append((layout, dict(seconds)))
        return "why"

    def steps(self, count: int) -> list[ParallelLayout]:
        """Return the layout of each step."""
        found = list[ParallelLayout]()
        for _ in range(count):
            while self.trial.due:
                if self.trial.move(ALONE) not in self.seconds:
                    self.trial.fails()
            layout = self.trial.layout
            with self.trial.timed():
                self.clock.now += self.seconds[layout] * (9 if layout not in found[-1:] else 1)
            found.append(layout)
        return found


@pytest.mark.parametrize(("times", "best"), [((1.0, 0.5, 2.0), B), ((1.0, 0.98, 2.0), A), ((1.0, 0.5, 0.4), C)])
def test_each_has_its_steps_and_the_fastest_stays(clock, times, best):
    seconds = dict(zip((A, B, C), times, strict=True))
    run = Run(clock, seconds, {})
    assert run.steps(3 * CALLS) == [each for each in (A, B, C) for _ in range(CALLS)]
    assert not run.trial.settled
    assert run.steps(4) == [best] * 4
    assert run.kept == [(best, pytest.approx(seconds))]
    assert (run.trial.settled, run.trial.reason) == (True, "why")


def test_short_runs_go_on_where_the_last_one_ended(clock):
    known: dict[ParallelLayout, float] = {}
    seconds = {A: 1.0, B: 0.5, C: 2.0}
    assert [Run(clock, seconds, known).steps(4) for _ in range(2)] == [[A, A, A, B], [B, B, B, C]]
    last = Run(clock, seconds, known)
    assert last.steps(CALLS + 1) == [C, C, C, B]
    assert last.kept == [(B, pytest.approx(seconds))]


def test_a_layout_is_noted_until_its_first_step_is_done(clock):
    run = Run(clock, {A: 1.0, C: 2.0}, {})
    run.steps(CALLS)
    assert run.noted == []
    run.steps(1)
    of_a = pytest.approx({A: 1.0})
    assert run.noted == [(of_a, B), (of_a, None), (of_a, C), (of_a, None)]  # B does not work


def test_a_first_step_that_fails_stays_noted(clock):
    run = Run(clock, {A: 1.0, B: 1.0}, {})
    run.steps(CALLS)
    run.trial.move(ALONE)
    with pytest.raises(ValueError, match="lost"), run.trial.timed():
        raise ValueError("lost")
    assert [trying for _, trying in run.noted] == [B]


def test_a_run_of_one_step_tells_nothing(clock):
    known: dict[ParallelLayout, float] = {}
    assert [Run(clock, {A: 1.0}, known).steps(1) for _ in range(3)] == [[A]] * 3
    assert known == {}


def test_what_does_not_work_is_left_out(clock):
    known: dict[ParallelLayout, float] = {}
    run = Run(clock, {A: 1.0, C: 1.0}, known)
    assert run.steps(2 * CALLS + 1) == [A] * CALLS + [C] * CALLS + [A]
    assert run.kept == [(A, pytest.approx({A: 1.0, C: 1.0}))]
    assert known[B] == math.inf


def test_a_step_that_fails_counts(clock):
    known = dict[ParallelLayout, float]()
    trial = LayoutTrial([A, B], known, Run(Clock(), {}, {}))
    for _ in range(CALLS):
        with pytest.raises(ValueError, match="lost"), trial.timed():
            raise ValueError("lost")
    assert trial.due
    assert list(known) == [A]


def test_a_little_faster_is_not_enough():
    assert [fastest(A, {A: 1.0, B: seconds}) for seconds in (0.96, 0.98)] == [B, A]
    assert fastest(A, {A: 1.0}) == A
