"""Two ways take turns until the ranks agree on the faster one."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from parallel_backend.distributed import trials
from parallel_backend.distributed.mesh import Axis
from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.distributed.trials import TURNS, RowTrials, Trials

CPU = torch.device("cpu")
ALONE = Axis(name="ulysses", ranks=(0,), index=0, group=None, gloo=True)


class Clock:
    """A clock that a call moves on."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def taken(first, second, *, calls, noise=None):
    """Which way each call goes when the ways take so many seconds; ``noise`` adds seconds to some calls."""
    clock, tried, ways = Clock(), Trials(), []
    with mock.patch.object(trials, "time", clock):
        for i in range(calls):
            trial = tried.of("a kind", 1000)
            with nullcontext(trial.second) if trial.second is not None else trial.turn(CPU, ALONE) as other:
                clock.now += (second if other else first) + (noise or {}).get(i, 0.0)
            ways.append(other)
    return ways


def test_they_take_turns():
    assert taken(1.0, 1.0, calls=8) == [False, True, True, False] * 2


def test_what_alternates_beside_them_counts_for_both():
    slow = dict.fromkeys(range(1, 2 * TURNS, 2), 0.5)
    assert not taken(1.0, 1.0, calls=2 * TURNS + 1, noise=slow)[-1]
    slow = dict.fromkeys(range(0, 2 * TURNS, 2), 0.5)
    assert not taken(1.0, 1.0, calls=2 * TURNS + 1, noise=slow)[-1]


def test_nothing_is_tried_while_bytes_are_counted():
    row = RowTrials(trials=Trials(), axis=ALONE, tokens=1000)
    with SentBytes():
        with SentBytes():
            pass
        assert row.of("a", 1) is None
    trial = row.of("a", 1)
    assert trial is not None
    trial.second = True
    with SentBytes():
        assert row.of("a", 1) is trial


@pytest.mark.parametrize(("second", "wins"), [(0.9, True), (0.99, False), (1.0, False), (1.5, False)])
def test_the_second_has_to_be_faster_by_more_than_noise(second, wins):
    assert taken(1.0, second, calls=2 * TURNS + 3)[2 * TURNS :] == [wins] * 3


def test_a_few_slow_calls_decide_nothing():
    noise = {0: 50.0, 1: 90.0, 9: 20.0, 11: 20.0}  # the first allocate memory; a machine may be busy
    assert taken(1.0, 0.8, calls=2 * TURNS + 1, noise=noise)[-1]


def test_all_ranks_have_to_find_it_faster():
    with mock.patch.object(trials, "all_true", return_value=False) as agreed:
        assert not taken(1.0, 0.5, calls=2 * TURNS + 1)[-1]
    agreed.assert_called_once_with(True, ALONE)


def test_lengths_that_differ_little_share_a_decision_and_kinds_do_not():
    tried = Trials()
    one = tried.of("a", 4096)
    assert tried.of("a", 4100) is one
    assert tried.of("a", 8192) is not one
    assert tried.of("b", 4096) is not one
