"""How often a probe repeats its work, and which rounds count."""

import pytest

from parallel_backend.distributed.world import world
from parallel_backend.planner import timing


class Work:
    """Takes some seconds of a clock of its own."""

    def __init__(self, first: float, each: float) -> None:
        self.now, self.rounds, self._seconds = 0.0, 0, (first, each)

    def __call__(self) -> int:
        self.now += self._seconds[min(self.rounds, 1)]
        self.rounds += 1
        return self.rounds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    def use(work: Work, *, gpu: bool) -> None:
        monkeypatch.setattr("time.perf_counter", lambda: work.now)
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    return use


@pytest.mark.parametrize(
    ("each", "gpu", "rounds"),
    [(2.0, False, 1), (0.6, False, 2), (0.3, False, 4), (0.001, False, 4), (2.0, True, 2), (0.6, True, 3)],
)
def test_long_work_is_measured_in_fewer_rounds(clock, each: float, gpu: bool, rounds: int) -> None:
    work = Work(each, each)
    clock(work, gpu=gpu)
    seconds, returned = timing.usual_of(work, world(0, 1))
    assert seconds == pytest.approx(each)
    assert returned == work.rounds == rounds


@pytest.mark.parametrize(("each", "rounds"), [(0.3, 4), (0.03, 8), (0.001, 21)])
def test_exchanges_are_measured_more_often(clock, each: float, rounds: int) -> None:
    work = Work(each, each)
    clock(work, gpu=False)
    assert timing.usual(work, world(0, 1), most=20) == pytest.approx(each)
    assert work.rounds == rounds


@pytest.mark.parametrize(("first", "each", "gpu"), [(0.5, 0.1, False), (30.0, 0.1, True), (30.0, 2.0, True)])
def test_the_first_round_does_not_count(clock, first: float, each: float, gpu: bool) -> None:
    work = Work(first, each)
    clock(work, gpu=gpu)
    assert timing.usual_here(work)[0] == pytest.approx(each)
    assert timing.seconds_of(Work(0.0, 0.0)) == timing.LEAST


def test_any_rank_may_end_the_rounds(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    work, others = Work(0.9, 0.9), iter([1, 0])  # another rank's first round was long enough
    clock(work, gpu=False)
    monkeypatch.setattr(timing, "lowest", lambda value, axis: min(value, next(others)))
    assert timing.usual(work, world(0, 1)) == pytest.approx(0.9)
    assert work.rounds == 1
