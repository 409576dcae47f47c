"""Ranks that sleep: which, how long, and that blocks are slowed down once."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lab.engine.handicap import Slowed, handicap, handicapped, slow_down, slowed
from parallel_backend import env
from parallel_backend.errors import InvalidRequest

CPU = torch.device("cpu")


def test_handicaps(monkeypatch):
    monkeypatch.setenv(env.HANDICAP.name, "1=2 3=1.5")
    assert [handicap(rank) for rank in range(4)] == [1.0, 2.0, 1.0, 1.5]
    assert handicapped([1.0, 1.0, 0.5, 1.0]) == (1.0, 0.5, 0.5, 0.667)
    for wrong in ("1", "1=fast", "1=0.5"):
        monkeypatch.setenv(env.HANDICAP.name, wrong)
        with pytest.raises(InvalidRequest, match="RANK=FACTOR"):
            handicap(0)


def test_the_blocks_of_a_slow_rank_sleep_once(monkeypatch):
    monkeypatch.setenv(env.HANDICAP.name, "1=3")
    family: Any = SimpleNamespace(run=lambda state: state)
    transformers: Any = SimpleNamespace(get=lambda mesh, *more: family)
    slow_down(transformers, CPU)
    for index in (0, 1, 1):
        assert transformers.get(cast(Any, SimpleNamespace(all_ranks=SimpleNamespace(index=index)))) is family
        assert isinstance(family.run, Slowed) == (index == 1)
    assert not isinstance(family.run._run, Slowed)


def test_a_slow_rank_takes_as_many_times_as_long():
    def work(state: Any) -> Any:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return state

    before = time.monotonic()
    state: Any = object()
    assert Slowed(work, 3.0, CPU)(state) is state
    assert time.monotonic() - before >= 0.15


def test_it_sleeps_between_operators_and_not_only_at_the_end(monkeypatch):
    """Ranks that wait for it in each layer would otherwise not notice."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    matrix = torch.randn(768, 768)
    with slowed(3.0, CPU):
        for _ in range(3):
            matrix = matrix @ matrix / 768
        during = len(slept)
    assert during >= 3
    slept.clear()
    with slowed(1.0, CPU):
        matrix @ matrix
    assert not slept


def test_what_a_sleep_takes_too_long_the_next_ones_lack(monkeypatch):
    late, slept, real = 0.01, list[float](), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + sum(slept))
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds + late))
    matrix = torch.randn(512, 512)
    begin = time.thread_time()
    with slowed(3.0, CPU):
        for _ in range(40):
            matrix = matrix @ matrix / 512
    assert len(slept) > 3
    assert sum(slept) <= 2.0 * (time.thread_time() - begin) + 1.1 * late
