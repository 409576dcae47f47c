"""The wall clock is set forward and back by a day while the ranks work."""

import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import Cancelled
from parallel_backend.protocol import request_log
from scripts.processes import wait_until

from .backend import IMPATIENT, Running, sample, start_fake, tensors

DAY = timedelta(days=1)
STEPS = int(1.1 * IMPATIENT.patience.hang / 0.05)
"""So many steps, of 50 ms each, take longer than any limit of this backend."""


def shifted(offset: Path) -> dict[str, str]:
    """The variables that make a process shift its wall clock by the seconds in a file."""
    compiler, library = shutil.which("cc"), offset.with_suffix(".so")
    if compiler is None:
        pytest.skip("there is no C compiler, which makes the library that shifts a process's clock")
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    offset.write_text("0")
    return {"CLOCK_OFFSET": str(offset), "LD_PRELOAD": str(library)}


def go_on(client: Client, running: Running, queued: Running) -> None:
    """Wait until the ranks have made many steps, and the client of a queued request and the supervisor hear more."""
    enough, keepalives, steps = len(running.progress) + STEPS, len(queued.progress), client.status().ranks[1].steps
    wait_until(lambda: running.error or len(running.progress) >= enough, 60.0, "many steps are made")
    wait_until(lambda: len(queued.progress) > keepalives + 1, 10.0, "keepalives go on")
    wait_until(lambda: client.status().ranks[1].steps > steps, 10.0, "heartbeats go on")


def logged(client: Client, count: int) -> list[request_log.RequestLine]:
    """Wait until this many requests are in the log, and return their lines."""
    log = client.endpoint.request_log
    wait_until(lambda: len(list(request_log.read(log))) == count, 10.0, "all requests are logged")
    return list(request_log.read(log))


def test_a_clock_that_jumps_ends_no_wait(runtime: Path, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    client = start_fake(runtime, variables=shifted(offset))
    client.call(sample(), tensors(2))
    running = Running(client=client, message=sample()).in_step()
    queued = Running(client=client, message=sample(), tensors=tensors(3))
    wait_until(lambda: client.status().queued, 10.0, "a request waits")
    before = client.status()
    for jump in (DAY, -DAY):
        offset.write_text(f"{jump.total_seconds():.0f}")
        go_on(client, running, queued)
    assert running.error is None
    assert queued.error is None
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)
    assert queued.ended(10.0) is None
    assert client.status().generation == before.generation
    assert torch.equal(client.call(sample(), tensors(4))["samples"], tensors(4)["x"] * 2)

    lines = logged(client, 4)
    assert [line.steps for line in lines] == [2, 1000, 3, 4], "in the order in which they ended"
    times = [datetime.fromisoformat(line.time) for line in lines]
    assert times[0] - times[3] > DAY / 2, "the clock was set back"
    assert all(0.0 <= seconds < 600.0 for line in lines for seconds in line.seconds.values())
