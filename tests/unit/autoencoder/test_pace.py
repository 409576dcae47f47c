"""After how many parts the ranks ask again."""

import time
from unittest import mock

import pytest
import torch

from parallel_backend.autoencoder.pace import INTERVAL, Pace
from parallel_backend.distributed.mesh import Axis

ALONE = Axis(name="ring", ranks=(0,), index=0, group=None, gloo=True)


def asked_after(seconds, parts, interval=INTERVAL):
    """Return after which parts the ranks ask, if each part takes so long."""
    with mock.patch.object(time, "perf_counter", return_value=0.0) as clock:
        asking, after = Pace(ALONE, torch.device("cpu"), lambda: False, interval), []
        for part in range(1, parts + 1):
            clock.return_value += seconds(part)
            if asking.part_done():
                after.append(part)
                assert asking.go_on()
    return after


def test_they_ask_after_a_tenth_of_a_second_of_work():
    assert asked_after(lambda part: 0.001, 130) == [1, 5, 21, 85]
    assert asked_after(lambda part: 0.04, 9) == [1, 3, 5, 7, 9]
    assert asked_after(lambda part: 2.0, 4) == [1, 2, 3, 4]
    assert asked_after(lambda part: 0.001 if part < 6 else 2.0, 24) == [1, 5, 21, 22, 23, 24]


def test_where_bytes_are_counted_they_ask_after_each_part():
    assert asked_after(lambda part: 0.001, 4, interval=0.0) == [1, 2, 3, 4]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_cancel_stops_them(cancelled):
    asking = Pace(ALONE, torch.device("cpu"), lambda: cancelled)
    assert asking.part_done()
    assert asking.go_on() is not cancelled
