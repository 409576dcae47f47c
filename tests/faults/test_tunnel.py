"""A backend on another machine, whose socket ``ssh -L`` forwards: nothing is started, killed or waited for here."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.client.devices import devices_of
from parallel_backend.client.exchange import Timeouts
from parallel_backend.errors import BackendUnavailable, DeadlineExceeded, InvalidRequest
from parallel_backend.machines.links.backends import named
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import Endpoint, connect
from parallel_backend.protocol.messages import Error, Trial
from parallel_backend.supervisor.limits import Limits
from scripts.processes import processes_of, wait_until
from tests.support import tiny
from tests.support.tunnel import Tunnel
from tests.support.weight_changes import Change

from .backend import TWO_RANKS, Running, run_command, sample, start_fake, tensors
from .conftest import runtime_folder
from .test_sent_files import SIZES, InMemory, forward, model

TIMEOUTS = Timeouts(connect=10.0, silence=30.0, cancel=10.0, stop=3.0)


@dataclass(kw_only=True)
class Machines:
    """A backend as clients beside it and of another machine see it, and the end of the tunnel at the latter."""

    local: Client
    remote: Client
    tunnel: Tunnel
    path: Path


def through_tunnel(local: Client) -> Machines:
    folder = local.endpoint.folder / "here"
    folder.mkdir(mode=0o700)
    path = folder / "socket"
    tunnel = Tunnel(path, local.endpoint.socket)
    endpoint = Endpoint(folder=folder / "runtime", remote=named(f"unix:{path}"))
    return Machines(local=local, remote=Client(endpoint=endpoint, timeouts=TIMEOUTS), tunnel=tunnel, path=path)


@pytest.fixture
def machines(runtime: Path) -> Iterator[Machines]:
    found = through_tunnel(start_fake(runtime, forwarded=True))
    yield found
    found.tunnel.close()
    assert not found.remote.endpoint.folder.exists(), "nothing is started here"


def test_a_sample_gives_what_it_gives_on_the_same_machine(machines: Machines) -> None:
    wanted = machines.local.call(sample(), tensors(3))
    assert torch.equal(machines.remote.call(sample(), tensors(3))["samples"], wanted["samples"])
    assert devices_of(machines.remote, "all").kind == "cpu"
    assert machines.remote.remote


def test_the_environment_names_it(machines: Machines, runtime: Path) -> None:
    backend = f"unix:{machines.path}"
    assert f"pid {machines.local.status().pid}" in run_command(runtime, "status", PARALLEL_DIT_BACKEND=backend).stdout
    logs = run_command(runtime, "logs", PARALLEL_DIT_BACKEND=backend)
    assert "the logs are on the backend's machine: run python -m parallel_backend logs there" in logs.stderr
    stopped = run_command(runtime, "stop", PARALLEL_DIT_BACKEND=backend)
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")


def test_stop_ends_the_backend_and_waits_for_no_process_here(machines: Machines) -> None:
    pid = machines.local.status().pid
    start = time.monotonic()
    machines.remote.stop()
    assert time.monotonic() - start < TIMEOUTS.stop
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 20.0, "the backend has ended")


def test_a_backend_that_does_not_answer_is_not_killed(machines: Machines) -> None:
    """This process is the socket's peer, and lives."""
    pid = machines.local.status().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match=r"does not end within 3 s: run .* stop on its machine"):
            machines.remote.stop()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert machines.path.exists(), "the socket is ssh's"
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 20.0, "the backend has ended by itself")


def test_without_a_backend_the_tunnel_is_named_at_once(machines: Machines, runtime: Path) -> None:
    machines.local.stop()
    start = time.monotonic()
    for ask in (machines.remote.status, machines.remote.stop, lambda: machines.remote.call(sample(), tensors(3))):
        with pytest.raises(BackendUnavailable, match=r"the tunnel at .* is there, and no backend answers .*forwarded"):
            ask()
    assert time.monotonic() - start < 5.0
    assert processes_of(runtime) == []


def test_a_dead_tunnel_starts_no_backend(machines: Machines, runtime: Path) -> None:
    running = Running(client=machines.remote, message=sample()).in_step()
    before = {process.pid for process in processes_of(runtime)}
    machines.tunnel.close()
    error = running.ended(20)
    assert isinstance(error, BackendUnavailable)
    assert str(error).startswith("a request broke off: no tunnel answers at ")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"no tunnel answers at .*: start ssh again, with -L /"):
            machines.remote.call(sample(), tensors(3))
        machines.path.unlink(missing_ok=True)
    assert {process.pid for process in processes_of(runtime)} <= before


def asked_by_other_code(client: Client, message: object) -> Error:
    with connect(client.endpoint, seconds=10) as sock:
        deadline = deadlines.Deadline(10, "an answer")
        frames.send_header(sock, frames.pack(frames.Frame(message=message, program="other")), deadline=deadline)
        answer = frames.recv_header(sock, deadline=deadline).message
    assert isinstance(answer, Error)
    return answer


def test_another_version_is_refused_and_ends_no_backend(machines: Machines) -> None:
    answer = asked_by_other_code(machines.remote, Trial(name="echo", model=TWO_RANKS))
    assert "runs different code from this ComfyUI: install the same version on all machines" in answer.message
    assert machines.local.status().state == "idle"


def test_a_backend_that_was_started_for_its_own_machine_says_so(runtime: Path) -> None:
    found = through_tunnel(start_fake(runtime))
    answer = asked_by_other_code(found.remote, sample(spec=replace(TWO_RANKS, content="0123")))
    assert answer.message.endswith("start it there with python -m parallel_backend serve --forwarded")
    with pytest.raises(InvalidRequest, match="started for its own machine alone: start it there with"):
        devices_of(found.remote, "all")
    assert found.local.status().state == "idle"
    found.tunnel.close()


def test_no_client_there_starts_a_backend_in_its_place(machines: Machines, runtime: Path) -> None:
    os.kill(machines.local.status().pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(runtime), 20.0, "the backend has ended")
    with pytest.raises(BackendUnavailable, match="the backend for several machines has ended"):
        machines.local.call(sample(), tensors(3))


@pytest.mark.parametrize("text", ["unix:", "unix:socket", f"unix:/{'x' * 200}"])
def test_what_is_no_socket_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a path from / of at most"):
        named(text)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_socket_of_another_user_is_refused(machines: Machines) -> None:
    os.chown(machines.path, 12345, -1)
    with pytest.raises(BackendUnavailable, match="belongs to user 12345"):
        machines.remote.status()


def test_files_of_memory_go_through_and_models_are_found_by_content(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "there" / "model", SIZES)
    lora = Change.write(tmp_path, tiny.transformer(SIZES), seed=1, rank=2, strength=0.7)
    file = InMemory(Path(lora.file.path).read_bytes())
    content = open_checkpoint(folder).content()
    with runtime_folder() as runtime:
        variables = {"PARALLEL_DIT_MODELS": str(tmp_path / "there")}
        local = start_fake(runtime, worker="losing_rank.py", limits=Limits(), forwarded=True, variables=variables)
        found = through_tunnel(local)
        wanted = forward(local, model(folder), adapters=((lora.file,), (lora.file,)))
        sent = replace(lora.file, path=file.path)
        given = model(Path("/comfyui/models/model"), content)
        torch.testing.assert_close(forward(found.remote, given, adapters=((sent,), (sent,))), wanted)
        found.tunnel.close()
    file.close()
