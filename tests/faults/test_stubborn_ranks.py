"""Ranks that ignore signals or that are stopped end in time, whatever ends them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_backend.client import query
from parallel_backend.client.client import Client
from parallel_backend.errors import BackendError, BackendUnavailable
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from scripts import processes
from scripts.processes import wait_until

from .backend import IMPATIENT, Running, sample, start_fake, tensors

LONG = pytest.mark.long
SECONDS = IMPATIENT.end / 2
"""Within which all processes must have ended: half of what the supervisor waits for killed ranks."""


def stop(client: Client) -> None:
    """Stop it without force."""
    start = time.monotonic()
    query.stop(client.endpoint, seconds=60.0)
    assert time.monotonic() - start < SECONDS


def end_supervisor(client: Client) -> None:
    os.kill(client.status().pid, signal.SIGTERM)


def kill_supervisor(client: Client) -> None:
    os.kill(client.status().pid, signal.SIGKILL)


def busy(client: Client, kind: str) -> Running:
    """Start a request that goes on, although its ranks get SIGTERM, or that does not, since they are stopped."""
    running = Running(client=client, message=sample("stubborn")).in_step()
    for rank in client.status().ranks:
        os.kill(rank.pid, signal.SIGTERM)
    made = len(running.progress)
    wait_until(lambda: running.error or len(running.progress) > made + 3, 10.0, "the ranks go on")
    assert running.error is None
    if kind == "stopped":
        for rank in client.status().ranks:
            os.kill(rank.pid, signal.SIGSTOP)
    return running


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (stop, "stopped"),
        *(
            pytest.param(end, kind, marks=LONG)
            for end, kind in (
                (end_supervisor, "ignoring"),
                (stop, "ignoring"),
                (end_supervisor, "stopped"),
                (kill_supervisor, "ignoring"),
                (kill_supervisor, "stopped"),
            )
        ),
    ],
)
def test_they_end_with_their_backend(runtime: Path, end: Callable[[Client], None], kind: str) -> None:
    client = start_fake(runtime)
    running = busy(client, kind)
    end(client)
    assert processes.describe(processes.wait_for_exit(runtime, SECONDS)) == ""
    assert isinstance(running.ended(SECONDS), BackendUnavailable)


@LONG
@pytest.mark.parametrize("kind", ["ignoring", "stopped"])
def test_they_end_when_other_devices_are_asked_for(runtime: Path, kind: str) -> None:
    client = start_fake(runtime)
    running = busy(client, kind)
    old = {rank.pid for rank in client.status().ranks}
    running.stop.set()
    assert isinstance(running.ended(20.0), BackendError)
    other = ModelSpec(path="/no/such/model", devices=Devices(kind="cpu", indices=(2,)))
    assert client.call(sample(spec=other), tensors(1))
    assert not old & {process.pid for process in processes.processes_of(runtime)}
