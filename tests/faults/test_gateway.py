"""Clients of another machine: what they get equals what a client of this machine gets, and ends like it.

All of it runs over 127.0.0.1.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend import env
from parallel_backend.client.client import Client
from parallel_backend.client.exchange import OnProgress
from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.machines.links.backends import Gateway
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import connect
from parallel_backend.protocol.messages import Error, Trial
from scripts.processes import wait_until
from tests.support.certificates import WITH_CERTIFICATE, WITH_TOKEN, copied

from .backend import TWO_RANKS, Running, run_command, sample, start_fake, tensors
from .conftest import runtime_folder
from .over_gateway import Machines, client_of, gateway_of
from .test_logs import logged
from .test_run_connection import predicted

CALL = """
import sys
from pathlib import Path
from tests.faults.backend import Running, sample
from tests.faults.over_gateway import client_of
client = client_of(sys.argv[1])
running = Running(client=client, message=sample()).in_step()
print("runs", flush=True)
running.ended(600)
"""


@pytest.fixture(scope="module")
def machines(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A backend that the tests of a module share, and a client that has a certificate."""
    mine = copied(certificates, tmp_path_factory.mktemp("client") / "certificates", WITH_CERTIFICATE)
    with runtime_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CERTIFICATES.name, str(mine))
        local = start_fake(folder, certificates=certificates)
        yield Machines(local=local, remote=client_of(local.status().listens), certificates=mine)


def _noted(steps: list[int]) -> OnProgress:
    return lambda progress, _: steps.append(progress.value)


def is_idle(client: Client) -> bool:
    return client.status().state == "idle"


@pytest.mark.parametrize("files", [WITH_CERTIFICATE, WITH_TOKEN], ids=["certificate", "token"])
@pytest.mark.daily(1)
def test_a_sample_gives_what_it_gives_on_the_same_machine(
    machines: Machines, files: tuple[str, ...], certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CERTIFICATES.name, str(copied(certificates, tmp_path / "mine", files)))
    found = []
    for client in (machines.local, machines.remote):
        steps: list[int] = []
        samples = client.call(sample(), tensors(3), on_progress=_noted(steps))
        found.append((samples["samples"], steps[-3:]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [1, 2, 3]


def test_large_tensors_travel_both_ways(machines: Machines) -> None:
    sent = {"x": torch.randn(8 << 20), "y": torch.arange(1 << 20)}
    reply = machines.remote.call(Trial(name="echo", model=TWO_RANKS, amount=4 << 20), sent)
    assert torch.equal(reply["x"], sent["x"])
    assert torch.equal(reply["y"], sent["y"])
    assert reply["made"].shape == (4 << 20,)


def test_a_refused_request_is_refused_in_the_same_words(machines: Machines) -> None:
    with pytest.raises(InvalidRequest, match="this request cannot work"):
        machines.remote.call(sample("refuse"), tensors(3))


def test_a_cancelled_request_ends_no_rank(machines: Machines) -> None:
    running = Running(client=machines.remote, message=sample()).in_step()
    ranks = [rank.pid for rank in machines.local.status().ranks]
    running.stop.set()
    assert isinstance(running.ended(20), Cancelled)
    wait_until(lambda: is_idle(machines.local), 20.0, "the ranks are free")
    assert [rank.pid for rank in machines.local.status().ranks] == ranks


def test_a_client_that_is_killed_frees_the_ranks(machines: Machines) -> None:
    address = machines.local.status().listens
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, address],
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        env={**os.environ, env.CERTIFICATES.name: str(machines.certificates)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        ranks = [rank.pid for rank in machines.local.status().ranks]
        assert machines.local.status().state == "busy"
        process.kill()
        wait_until(lambda: is_idle(machines.local), 20.0, "the ranks are free")
    assert [rank.pid for rank in machines.local.status().ranks] == ranks


def test_a_client_that_stops_reading_is_not_waited_for(machines: Machines) -> None:
    """Others are served meanwhile."""
    with connect(machines.remote.endpoint, seconds=20) as sock:
        message = Trial(name="echo", model=TWO_RANKS, amount=16 << 20)
        frames.send_header(sock, frames.pack(frames.Frame(message=message)), deadline=deadlines.Deadline(10, "sending"))
        wait_until(lambda: machines.local.status().running, 20.0, "the request runs")
        assert machines.remote.status().pid == machines.local.status().pid
    wait_until(lambda: is_idle(machines.local), 20.0, "the ranks are free")


def test_a_client_of_other_code_is_refused_and_ends_no_backend(machines: Machines) -> None:
    with connect(machines.remote.endpoint, seconds=20) as sock:
        frame = frames.Frame(message=Trial(name="echo", model=TWO_RANKS), program="other")
        deadline = deadlines.Deadline(20, "an answer")
        frames.send_header(sock, frames.pack(frame), deadline=deadline)
        answer = frames.recv_header(sock, deadline=deadline).message
    assert isinstance(answer, Error)
    assert answer.message.endswith("install the same version on all machines, and start the backend again")
    assert machines.remote.status().state == "idle"


def test_nothing_else_listens(machines: Machines) -> None:
    supervisor = psutil.Process(machines.local.status().pid)
    remote = machines.remote.endpoint.remote
    assert isinstance(remote, Gateway)
    asked_for = ("127.0.0.1", remote.address.port)
    for process in (supervisor, psutil.Process(machines.gateway)):
        listening = [tuple(each.laddr) for each in process.net_connections("inet") if each.status == "LISTEN"]
        assert listening == [asked_for]


def test_nothing_listens_unless_asked_for(client: Client) -> None:
    assert client.status().listens == ""
    assert not psutil.Process(client.status().pid).net_connections("inet")
    assert gateway_of(client) == 0


def test_commands_work_or_say_what_to_do(machines: Machines, tmp_path: Path) -> None:
    address = machines.local.status().listens
    variables = {"PARALLEL_DIT_BACKEND": address, env.CERTIFICATES.name: str(machines.certificates)}
    status = run_command(tmp_path, "status", timeout=60.0, **variables)
    assert f"pid {machines.local.status().pid}" in status.stdout
    assert f"listens      {address}\n" in status.stdout
    for command, words in (("logs", "the logs are on 127.0.0.1: run"), ("serve", "PARALLEL_DIT_BACKEND names")):
        refused = run_command(tmp_path, command, timeout=60.0, **variables)
        assert refused.returncode == 1
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a client of another machine has made local files"


def test_the_steps_of_a_run_share_a_connection_and_give_way(machines: Machines) -> None:
    before = len(logged(machines.local, 0))
    predicted(machines.remote, 1.0)
    predicted(machines.remote, 2.0)
    start = time.monotonic()
    machines.local.call(sample(), tensors(1))
    assert time.monotonic() - start < 5.0
    predicted(machines.remote, 3.0)
    machines.remote.end_run()
    wait_until(lambda: machines.local.status().state == "idle", 5.0, "the ranks are free")
    assert [(line.kind, line.steps) for line in logged(machines.local, before + 3)[before:]] == [
        ("Forward", 2), ("Sample", 1), ("Forward", 1),
    ]  # fmt: skip
