"""What a rank counts, and which ranks a supervisor takes for stuck."""

import math
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from parallel_backend.engine.counting import counted
from parallel_backend.progress import (
    CLIENT,
    COMPILING,
    CONNECTING,
    IDLE,
    LOADING,
    PROGRESS,
    ProgressCounter,
    RankProgress,
)
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.protocol.status import RankStatus
from parallel_backend.supervisor.limits import Patience
from parallel_backend.supervisor.ranks import stuck_ranks
from parallel_backend.supervisor.ranks.process import Process
from parallel_backend.supervisor.ranks.rank_process import RankProcess

GPUS = Devices(kind="cuda", indices=(0, 1))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_counts_phases_and_durations():
    clock = Clock()
    counter = ProgressCounter(clock, lambda: 0.0)
    assert counter.read() == RankProgress()
    with counter.phase("sampling"):
        counter.step(2, 20)
        for seconds in (50.0, 3.0, 4.0):  # the first count of a phase may include a compilation
            clock.now += seconds
            counter.tick()
        with counter.waiting():
            clock.now += 30.0
            assert counter.read().waiting
        clock.now += 1.0
        counter.tick()
        with counter.phase(LOADING):
            clock.now += 9.0
            assert counter.read() == RankProgress(phase=LOADING, count=4, quiet=9.0)
        clock.now += 2.0
        reading = counter.read()
        assert reading == RankProgress(phase="sampling", step=2, steps=20, count=4, quiet=2.0, longest=4.0)
        assert str(reading) == "sampling (step 3 of 20)"
        assert str(replace(reading, step=20)) == "sampling (step 20 of 20)"
    assert (counter.read().phase, counter.read().count) == (IDLE, 0)
    with counter.phase("sampling"):
        assert counter.read().longest == 4.0  # known from the request before


def test_only_the_last_durations_count():
    clock = Clock()
    counter = ProgressCounter(clock, lambda: 0.0)
    with counter.phase("sampling"):
        for seconds in (1.0, 8.0, *[2.0] * 64):
            clock.now += seconds
            counter.tick()
        assert counter.read().longest == 2.0


def test_a_gpu_that_has_not_reached_a_mark_makes_no_progress():
    clock, reached = Clock(), [False, False]
    marks = iter([lambda: reached[0], lambda: reached[1]])
    counter = ProgressCounter(clock, lambda: 0.0)
    counter.marker = lambda: next(marks)
    with counter.phase("sampling"):
        counter.tick()
        counter.tick()
        clock.now += 5.0
        assert (counter.read().count, counter.read().quiet) == (0, 5.0)
        reached[0] = True
        assert (counter.read().count, counter.read().quiet) == (1, 0.0)
        reached[1] = True
        assert counter.read().count == 2


def test_a_process_computes_that_uses_its_cores():
    clock, cpu = Clock(), Clock()
    counter = ProgressCounter(clock, cpu)
    for used, computes in ((1.0, True), (0.01, False), (0.2, True)):
        clock.now += 1.0
        cpu.now += used
        assert counter.read().computing == computes
        assert counter.read().computing == computes  # an interval that is too short to measure


def test_the_layers_of_a_module_are_counted_while_the_context_lasts():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with counted(module, "encoding text"):
        before = PROGRESS.read().count
        module(torch.zeros(1, 2))
        assert PROGRESS.read().count - before == 3
    before = PROGRESS.read().count
    module(torch.zeros(1, 2))
    assert PROGRESS.read().count == before


def rank(number: int, quiet: float, progress: RankProgress, device: str = "cuda:0") -> RankProcess:
    return RankProcess(
        rank=number,
        process=cast(Process, SimpleNamespace(pid=10 + number, host="")),
        control=cast(socket.socket, None),
        pidfd=0,
        status=RankStatus(rank=number, pid=10 + number, device=device, memory=0, progress=progress),
        ready=True,
        last_heard=1000.0,
        last_progress=1000.0 - quiet,
    )


SAMPLING = RankProgress(phase="sampling", step=2, steps=20, count=7, longest=0.5)
BUSY = replace(SAMPLING, computing=True)


@pytest.mark.parametrize(
    ("progress", "seconds"),
    [
        (SAMPLING, 60.0),
        (replace(SAMPLING, longest=5.0), 100.0),
        (replace(SAMPLING, longest=0.0), 180.0),
        (RankProgress(phase=LOADING, longest=50.0), 120.0),
        (RankProgress(phase=CONNECTING), 60.0),
        (RankProgress(phase=COMPILING), 600.0),
        (RankProgress(phase=CLIENT), math.inf),
    ],
)
def test_how_long_a_rank_may_make_no_progress(progress, seconds):
    assert stuck_ranks.limit(progress, Patience()) == seconds


@pytest.mark.parametrize(
    ("device", "quiet", "since", "ends"),
    [
        ("cuda:0", 61.0, 0.0, True),  # the host waits for its GPU in a loop
        ("cpu", 599.0, 0.0, False),
        ("cpu", 61.0, 59.0, False),  # it reads from a disk for a while
        ("cpu", 61.0, 61.0, True),
        ("cpu", 601.0, 0.0, True),
    ],
)
def test_a_rank_without_a_gpu_that_computes_has_more_time(device, quiet, since, ends):
    made = rank(0, quiet, SAMPLING, device)
    made.last_heard -= since
    made.report(replace(made.status, progress=replace(BUSY, quiet=quiet - since)))
    made.last_heard += since
    assert bool(stuck_ranks.stuck([made], Patience())) == ends


WAITING, IDLING = replace(SAMPLING, waiting=True), RankProgress()


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ([(61.0, SAMPLING), (59.0, SAMPLING)], []),  # one works, and the other may be waiting for it
        ([(61.0, SAMPLING), (61.0, SAMPLING)], [0, 1]),
        ([(61.0, SAMPLING), (1.0, IDLING)], []),  # the other has just ended the request, and this one soon will
        ([(900.0, IDLING), (900.0, IDLING)], []),
        ([(900.0, IDLING), (61.0, WAITING)], [1]),
        ([(61.0, WAITING), (61.0, SAMPLING)], [1]),
        ([(61.0, WAITING), (61.0, replace(WAITING, count=6))], [1]),
        ([(61.0, replace(SAMPLING, count=6)), (61.0, SAMPLING)], [0]),
        ([(61.0, WAITING), (61.0, replace(WAITING, phase="decoding", count=6))], [0, 1]),
        ([(900.0, RankProgress(phase=CLIENT)), (61.0, WAITING)], []),
        ([(100.0, RankProgress(phase=LOADING)), (100.0, WAITING)], []),
        ([(121.0, RankProgress(phase=LOADING)), (121.0, WAITING)], [0]),
    ],
)
def test_the_likeliest_cause(ranks, culprits):
    made = [rank(number, quiet, progress) for number, (quiet, progress) in enumerate(ranks)]
    assert [each.rank for each in stuck_ranks.stuck(made, Patience())] == culprits


def test_the_sentence_names_ranks_phases_and_what_to_try():
    hung, waits = rank(1, 61.2, SAMPLING), rank(0, 61.0, WAITING)
    one = stuck_ranks.describe([hung], [waits, hung], GPUS)
    assert one == (
        "rank 1 (pid 11) made no progress for 61 s while sampling (step 3 of 20), and the other ranks wait for it"
    )
    both = stuck_ranks.describe([waits, hung], [waits, hung], GPUS)
    assert both == (
        "rank 0 (pid 10) made no progress for 61 s while sampling (step 3 of 20) and "
        "rank 1 (pid 11) made no progress for 61 s while sampling (step 3 of 20)"
    )
    connecting = [rank(number, 61.0, RankProgress(phase=CONNECTING)) for number in range(2)]
    nccl = stuck_ranks.describe(connecting, connecting, GPUS)
    assert all(word in nccl for word in ("NCCL_P2P_DISABLE=1", "/dev/shm", "IOMMU"))
    assert "gloo" not in nccl
    connecting[1].ready = False
    starting = stuck_ranks.describe(connecting, connecting, GPUS)
    assert all(word in starting for word in ("NCCL_P2P_DISABLE=1", "gloo"))
    gloo = stuck_ranks.describe(connecting, connecting, replace(GPUS, collectives="gloo"))
    assert "loopback" in gloo
    assert "NCCL" not in gloo


def test_a_rank_that_is_silent_while_it_connects_is_not_thought_to_work():
    """It may hold Python's lock: rank 1 was heard last 70 s before rank 0."""
    connects = [rank(number, 71.0, RankProgress(phase=CONNECTING)) for number in range(2)]
    samples = [rank(number, 71.0, SAMPLING) for number in range(2)]
    for ranks in (connects, samples):
        ranks[1].last_heard -= 70.0
    assert stuck_ranks.stuck(connects, Patience()) == connects
    assert stuck_ranks.stuck(samples, Patience()) == []
    assert stuck_ranks.describe(connects[1:], connects, GPUS).startswith("rank 1 (pid 11) made no progress for 71 s")


def test_time_in_which_the_supervisor_was_suspended_does_not_count():
    stopped = rank(0, 50.0, SAMPLING)
    stopped.discount(40.0, 1000.0)
    stopped.report(replace(stopped.status, progress=replace(SAMPLING, quiet=50.0)))
    assert stopped.last_heard - stopped.last_progress == 10.0


def test_the_seconds_of_each_phase_of_a_request():
    clock = Clock()
    counter = ProgressCounter(clock, lambda: 0.0)
    for _ in range(2):  # what an earlier request spent does not count
        with counter.phase("preparing"):
            clock.now += 1.0
            with counter.phase(LOADING):
                clock.now += 10.0
            with counter.phase("sampling"):
                clock.now += 100.0
            clock.now += 1.0
        clock.now += 1000.0
    assert counter.spent() == {"preparing": 2.0, LOADING: 10.0, "sampling": 100.0}
