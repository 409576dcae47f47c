"""Clients of another machine: what they get equals what a client of this machine gets, and ends like it.

All of it runs over 127.0.0.1.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend import env
from parallel_backend.client.client import Client
from parallel_backend.client.exchange import OnProgress, Timeouts
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import BackendUnavailable, Cancelled, InvalidRequest
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.links.backends import Gateway
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import GATEWAY_LOG, Endpoint, connect
from parallel_backend.protocol.messages import Error, Trial
from scripts.processes import processes_of, wait_until
from tests.support.certificates import WITH_CERTIFICATE, WITH_TOKEN, copied, made

from .backend import TWO_RANKS, Running, run_command, sample, start_fake, tensors
from .conftest import runtime_folder

TIMEOUTS = Timeouts(connect=20.0, silence=30.0, cancel=20.0)
CALL = """
import sys
from pathlib import Path
from tests.faults.backend import Running, sample
from tests.faults.test_gateway import client_of
client = client_of(sys.argv[1])
running = Running(client=client, message=sample()).in_step()
print("runs", flush=True)
running.ended(600)
"""


def client_of(address: str) -> Client:
    """Return a client of the backend at an address, which has no runtime folder of its own."""
    remote = Gateway(address=Address.parse(address, what="address"))
    return Client(endpoint=Endpoint(folder=Path("/no/such/folder"), remote=remote), timeouts=TIMEOUTS)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A backend that listens, as a client beside it and one of another machine see it; and a client's certificates."""

    local: Client
    remote: Client
    certificates: Path

    @property
    def gateway(self) -> int:
        """The gateway's process id; 0 if there is none."""
        return gateway_of(self.local)

    def log(self, name: str = GATEWAY_LOG) -> str:
        """A log of the backend."""
        path = self.local.endpoint.logs / name
        return path.read_text() if path.exists() else ""


def gateway_of(local: Client) -> int:
    """Return the process id of a backend's gateway; 0 if there is none."""
    children = psutil.Process(local.status().pid).children()
    return next((child.pid for child in children if "parallel_backend.machines.gateway" in child.cmdline()), 0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("gateway") / "certificates")


@pytest.fixture(scope="module")
def machines(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A backend that the tests of a module share, and a client that has a certificate."""
    mine = copied(certificates, tmp_path_factory.mktemp("client") / "certificates", WITH_CERTIFICATE)
    with runtime_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CERTIFICATES.name, str(mine))
        local = start_fake(folder, certificates=certificates)
        yield Machines(local=local, remote=client_of(local.status().listens), certificates=mine)


@pytest.fixture
def own(runtime: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """A backend of one test."""
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    local = start_fake(runtime, certificates=certificates)
    return Machines(local=local, remote=client_of(local.status().listens), certificates=certificates)


def _noted(steps: list[int]) -> OnProgress:
    return lambda progress, _: steps.append(progress.value)


def is_idle(client: Client) -> bool:
    return client.status().state == "idle"


@pytest.mark.parametrize("files", [WITH_CERTIFICATE, WITH_TOKEN], ids=["certificate", "token"])
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


def test_stop_over_tls_is_answered_and_leaves_no_process(own: Machines) -> None:
    running = Running(client=own.remote, message=sample()).in_step()
    own.remote.stop()
    assert isinstance(running.ended(20), BackendUnavailable)
    folder = own.local.endpoint.folder
    wait_until(lambda: not processes_of(folder), 20.0, "all processes have ended")
    with pytest.raises(BackendUnavailable, match=r"no backend answers at .*; start it there with .* serve --listen"):
        own.remote.call(sample(), tensors(3))
    assert "should not have happened" not in own.log() + own.log("backend.log")


def test_a_gateway_that_is_killed_comes_back(own: Machines) -> None:
    beside = Running(client=own.local, message=sample()).in_step()
    for _ in range(2):
        killed = own.gateway
        os.kill(killed, signal.SIGKILL)
        assert own.remote.status().pid == own.local.status().pid
        assert own.gateway not in (0, killed)
        assert f"the gateway (pid {killed}) was killed by SIGKILL" in own.log("backend.log")
    assert beside.error is None
    beside.stop.set()
    assert isinstance(beside.ended(20), Cancelled)


def test_a_request_goes_on_after_the_gateway_was_killed(own: Machines) -> None:
    notes: list[str] = []
    killed: list[int] = []

    def kill_once(progress, _):
        if progress.phase == "sampling" and not killed:
            killed.append(own.gateway)
            os.kill(killed[0], signal.SIGKILL)

    request = RetriedRequest(
        own.remote, sample(), tensors(5), on_progress=kill_once, recovery=Recovery(notify=notes.append)
    )
    assert torch.equal(request.run()["samples"], own.local.call(sample(), tensors(5))["samples"])
    assert len(notes) == 1
    assert "the connection to the backend at 127.0.0.1" in notes[0]


def test_a_supervisor_that_is_killed_takes_the_gateway_along(own: Machines) -> None:
    gateway = psutil.Process(own.gateway)
    os.kill(own.local.status().pid, signal.SIGKILL)
    wait_until(lambda: not gateway.is_running(), 20.0, "the gateway has ended")
    with pytest.raises(BackendUnavailable, match="no backend answers at"):
        own.remote.status()


def test_no_client_starts_a_backend_in_the_place_of_one_for_several_machines(own: Machines) -> None:
    """It would lock the real one out, which somebody or a launcher is about to start again."""
    os.kill(own.local.status().pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(own.local.endpoint.folder), 20.0, "nothing is left")
    with pytest.raises(BackendUnavailable, match="the backend for several machines has ended"):
        own.local.call(sample(), tensors(1))
    assert run_command(own.local.endpoint.folder, "stop").stdout == "stopped\n"
    assert not own.local.endpoint.by_hand.exists()


def test_a_port_in_use_is_one_sentence(own: Machines, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir(mode=0o700)
    address = own.local.status().listens
    for options in ((), ("--detach",)):
        refused = run_command(
            folder,
            "serve",
            "--listen",
            address,
            *options,
            timeout=60.0,
            **{env.CERTIFICATES.name: str(own.certificates)},
        )
        assert refused.returncode == 1
        assert f"nothing can listen at {address}: Address already in use" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert not (folder / "socket").exists()


def test_serve_listens_without_an_end_and_says_so_aloud_if_everywhere(
    runtime: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARALLEL_DIT_IDLE_TIMEOUT")
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    served = run_command(runtime, "serve", "--listen", "0.0.0.0:0", "--detach", "--spares", "0")
    assert "and listens at 0.0.0.0:" in served.stdout, served.stderr
    local = Client(endpoint=Endpoint(folder=runtime), timeouts=TIMEOUTS)
    status = local.status()
    assert status.idle_timeout == 0
    assert "EVERY network of this machine" in local.endpoint.log.read_text()
    for option, words in (("--idle-timeout=5", "never ends by itself"), ("--spares=1", "keeps 0 spare ranks")):
        refused = run_command(runtime, "serve", "--detach", option)
        assert (refused.returncode, refused.stderr) == (1, f"a backend that {words} already runs: stop it first\n")
    assert run_command(runtime, "serve", "--detach", "--spares", "0", "--idle-timeout", "0").returncode == 0
    port = status.listens.rpartition(":")[2]
    assert client_of(f"127.0.0.1:{port}").status().pid == status.pid
    local.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
    assert not processes_of(runtime)
