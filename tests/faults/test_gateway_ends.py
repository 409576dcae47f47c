"""How a backend that listens for other machines starts, what ends with its gateway, and how both end."""

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend import env
from parallel_backend.client.client import Client
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import BackendUnavailable, Cancelled
from parallel_backend.protocol.endpoint import Endpoint
from scripts.processes import processes_of, wait_until

from .backend import Running, run_command, sample, start_fake, tensors
from .over_gateway import TIMEOUTS, Machines, client_of


@pytest.fixture
def own(runtime: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """A backend of one test."""
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    local = start_fake(runtime, certificates=certificates)
    return Machines(local=local, remote=client_of(local.status().listens), certificates=certificates)


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
