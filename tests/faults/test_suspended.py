"""Processes that stop for a while and go on, as when a machine sleeps or a person presses Ctrl-Z."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import Cancelled, RankFailed
from scripts.comfy_paths import ROOT
from scripts.processes import wait_until

from .backend import IMPATIENT, Running, environment, sample, start_fake, tensors
from .conftest import runtime_folder

LONG = pytest.mark.long
HANG = IMPATIENT.patience.hang
SHORT, LONGER = HANG - 2.0, HANG + 1.5
"""Seconds of a pause below and above the limit of a rank's silence."""
AFTERWARDS = 1.5 * HANG
"""Seconds within which a rank would be given up, if the pause counted."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with runtime_folder() as folder:
        yield start_fake(folder)


def backend_of(client: Client) -> list[int]:
    status = client.status()
    return [status.pid, *(rank.pid for rank in status.ranks)]


@contextmanager
def suspended(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes as long as the context lasts, and let them go on in the same order."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = [psutil.Process(pid) for pid in pids]
        wait_until(lambda: {each.status() for each in found} == {psutil.STATUS_STOPPED}, 5.0, "all have stopped")
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def steps_on(running: Running, seconds: float) -> None:
    """Let a run go on for a while, and check that it makes steps until the end of it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        another_step(running)


def another_step(running: Running) -> None:
    enough = len(running.progress) + 1
    wait_until(lambda: running.error or len(running.progress) >= enough, 10.0, "there is another step")
    assert running.error is None, running.error


@pytest.mark.parametrize(
    ("seconds", "resumed_first"),
    [
        (LONGER, "ranks"),
        pytest.param(LONGER, "supervisor", marks=LONG),
        pytest.param(SHORT, "ranks", marks=LONG),
        pytest.param(SHORT, "supervisor", marks=LONG),
    ],
)
def test_a_backend_that_sleeps_goes_on(client: Client, seconds: float, resumed_first: str) -> None:
    """Nothing is taken for dead, however long it was, and in whichever order the processes wake up."""
    running = Running(client=client, message=sample()).in_step()
    before, pids = client.status(), backend_of(client)
    with suspended(pids if resumed_first == "supervisor" else pids[::-1]):
        time.sleep(seconds)
    steps_on(running, AFTERWARDS)
    after = client.status()
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert after.internal_errors == 0
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)


@LONG
@LONG
def test_ranks_that_sleep_a_little_go_on(client: Client) -> None:
    running = Running(client=client, message=sample()).in_step()
    before = client.status()
    with suspended([rank.pid for rank in before.ranks]):
        time.sleep(SHORT)
    steps_on(running, AFTERWARDS)
    assert client.status().generation == before.generation
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)


@LONG
def test_ranks_that_sleep_for_too_long_are_replaced(client: Client) -> None:
    running = Running(client=client, message=sample()).in_step()
    for rank in client.status().ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    error = running.ended(HANG + 15.0)
    assert isinstance(error, RankFailed)
    assert "stopped answering" in str(error)
    assert torch.equal(client.call(sample(), tensors(2))["samples"], tensors(2)["x"] * 2)


CALLER = """
import sys; sys.path.insert(0, sys.argv[1])
from tests.faults.backend import *
got = Client().call(sample(), tensors(int(sys.argv[2])))
print(torch.equal(got["samples"], tensors(1)["x"] * 2))
"""


def call_in_a_process(runtime: Path, steps: int) -> "subprocess.Popen[str]":
    """Start a process that makes a request and prints whether the answer is right."""
    command = [sys.executable, "-c", CALLER, str(ROOT), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(runtime), cwd=runtime)


@LONG
def test_clients_that_sleep_get_their_answers(client: Client) -> None:
    """One of them while its request runs, the other in the queue, for longer than there is between keepalives."""
    steps = 80
    ahead = Running(client=client, message=sample(), tensors=tensors(4000)).in_step()
    generation, folder = client.status().generation, client.endpoint.folder
    with call_in_a_process(folder, steps) as one, call_in_a_process(folder, steps) as other:
        wait_until(lambda: len(client.status().queued) == 2, 60.0, "both wait")
        ids = client.status().queued
        ahead.stop.set()
        assert isinstance(ahead.ended(10.0), Cancelled)
        wait_until(lambda: client.status().running in ids, 5.0, "one of them runs")
        with suspended([one.pid, other.pid]):
            time.sleep(3 * IMPATIENT.keepalive_interval)
            assert client.status().queued == ids[1:], "the other one waits"
        assert [process.communicate(timeout=60.0)[0] for process in (one, other)] == ["True\n", "True\n"]
    assert client.status().generation == generation
