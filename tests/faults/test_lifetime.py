"""No process outlives a stop, an idle timeout, or the death of the supervisor or of a client."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Timeouts
from parallel_backend.errors import BackendUnavailable, Cancelled, InvalidRequest, RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import Endpoint, connect, listen
from parallel_backend.protocol.messages import Done, Trial, Unload
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.status import Status
from scripts import processes
from scripts.comfy_paths import ROOT
from scripts.processes import wait_until

from .backend import TWO_RANKS, Running, environment, run_command, sample, start_fake, tensors


def assert_none_left(runtime: Path, seconds: float = 5.0) -> None:
    assert not processes.wait_for_exit(runtime, seconds)


def test_stop_leaves_nothing(runtime: Path) -> None:
    client = start_fake(runtime)
    running = Running(client=client, message=sample()).in_step()
    client.stop()
    assert not processes.processes_of(runtime)
    error = running.ended(5.0)
    assert isinstance(error, BackendUnavailable)
    assert not client.endpoint.socket.exists()


def test_a_killed_supervisor_takes_its_ranks_along(runtime: Path) -> None:
    client = start_fake(runtime)
    running = Running(client=client, message=sample()).in_step()
    os.kill(client.status().pid, signal.SIGKILL)
    assert_none_left(runtime)
    error = running.ended(5.0)
    assert isinstance(error, BackendUnavailable)
    assert "in the middle of a request" in str(error)


def test_a_supervisor_killed_while_ranks_start_takes_them_along(runtime: Path) -> None:
    client = start_fake(runtime)
    Running(client=client, message=sample())
    status = wait_until(lambda: client.status() if client.status().ranks else None, 10.0, "the ranks start")
    assert status.state == "starting"
    os.kill(status.pid, signal.SIGKILL)
    assert_none_left(runtime)


def test_a_stopped_supervisor_is_ended_by_force(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    os.kill(client.status().pid, signal.SIGSTOP)
    impatient = Client(endpoint=client.endpoint, timeouts=Timeouts(stop=1.0))
    impatient.stop()
    assert_none_left(runtime)


def test_an_idle_backend_ends_itself(runtime: Path) -> None:
    client = start_fake(runtime, idle_timeout=3.0)
    client.call(sample(), tensors(1))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert processes.processes_of(runtime)
        client.status()
    assert_none_left(runtime)


def test_a_busy_backend_is_not_idle(runtime: Path) -> None:
    client = start_fake(runtime, idle_timeout=2.0)
    result = client.call(sample(), tensors(120))
    assert result["samples"].shape == (2, 3)


def test_sigterm_ends_it_in_order(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    os.kill(client.status().pid, signal.SIGTERM)
    assert_none_left(runtime)
    assert not client.endpoint.socket.exists()


def test_two_clients_at_once_start_one_backend(runtime: Path) -> None:
    def start(_: int) -> int:
        client = Client(endpoint=Endpoint(folder=runtime))
        client.start()
        return client.status().pid

    with ThreadPoolExecutor(4) as pool:
        pids = set(pool.map(start, range(4)))
    assert len(pids) == 1
    serving = [process for process in processes.processes_of(runtime) if "serve" in process.cmdline()]
    gone, alive = psutil.wait_procs(serving, timeout=15.0)
    assert {process.pid for process in alive} == pids
    assert len(gone) == len(serving) - 1


def test_the_backend_outlives_the_client_that_started_it(runtime: Path) -> None:
    started = run_command(runtime, "serve", "--detach")
    assert started.returncode == 0, started.stderr
    status = Client(endpoint=Endpoint(folder=runtime)).status()
    assert f"pid {status.pid}" in started.stdout
    assert status.idle_timeout == 120.0


def test_a_backend_that_cannot_start_is_quoted(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DIT_IDLE_TIMEOUT", "soon")
    client = Client(endpoint=Endpoint(folder=runtime))
    with pytest.raises(BackendUnavailable, match="IDLE_TIMEOUT=soon: it must be a number of seconds") as caught:
        client.call(Trial(name="echo", model=TWO_RANKS))
    assert str(client.endpoint.start_log) in str(caught.value)


def test_another_interpreter_that_lacks_a_package(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", str(python))
    with pytest.raises(BackendUnavailable, match=f"No module named .*: run {python} -m pip install -r /.*requirements"):
        Client(endpoint=Endpoint(folder=runtime)).call(Trial(name="echo", model=TWO_RANKS))


def test_another_interpreter_that_is_not_there(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", "/no/python")
    with pytest.raises(BackendUnavailable, match="/no/python does not start"):
        Client(endpoint=Endpoint(folder=runtime)).call(Trial(name="echo", model=TWO_RANKS))


def test_the_commands(runtime: Path) -> None:
    absent = run_command(runtime, "status")
    assert absent.returncode == 1
    assert absent.stderr == f"no backend answers at {runtime}/socket\n"
    assert run_command(runtime, "stop").returncode == 1
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    twice = run_command(runtime, "serve")
    assert twice.returncode == 75
    assert "a backend already runs" in twice.stderr
    assert "2, generation 1" in run_command(runtime, "status").stdout
    status = msgspec.json.decode(run_command(runtime, "status", "--json").stdout, type=Status)
    for rank in status.ranks:
        process = psutil.Process(rank.pid)
        assert process.ppid() == status.pid
        assert "fake_worker.py" in " ".join(process.cmdline())
        assert abs(process.memory_info().rss - rank.memory) < 0.2 * rank.memory
    assert run_command(runtime, "stop").stdout == "stopped\n"
    assert not processes.processes_of(runtime)


def test_a_negative_idle_time_is_refused(runtime: Path) -> None:
    refused = run_command(runtime, "serve", "--idle-timeout", "-1")
    assert refused.returncode == 2
    assert "'-1' is not a number of seconds, 0 or more" in refused.stderr


def test_a_number_of_spare_ranks_that_is_none_is_refused(runtime: Path) -> None:
    refused = run_command(runtime, "serve", "--spares", "-1")
    assert refused.returncode == 2
    assert "'-1' is not a number, 0 or more" in refused.stderr
    refused = run_command(runtime, "serve", PARALLEL_DIT_SPARES="many")
    assert refused.returncode == 1
    assert refused.stderr == "PARALLEL_DIT_SPARES=many: it must be a number, 0 or more\n"


def test_a_killed_client_frees_the_ranks(runtime: Path) -> None:
    client = start_fake(runtime)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.faults.backend import *\n"
        "Client().call(sample(), tensors(1000))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(ROOT)], env=environment(runtime), cwd=runtime)
    wait_until(lambda: any(rank.steps for rank in client.status().ranks), 60.0, "a rank has stepped")
    process.kill()
    process.wait(5)
    wait_until(lambda: client.status().running is None, 5.0, "the request was cancelled")
    steps = client.status().ranks[0].steps
    assert client.call(sample(), tensors(1))
    assert wait_until(lambda: client.status().ranks[0].steps, 3.0, "a heartbeat has arrived") <= steps + 40


def test_a_start_waits_for_one_that_is_ending(runtime: Path) -> None:
    endpoint = Endpoint(folder=runtime)
    lock, listener = listen(endpoint, backlog=1)
    listener.close()
    endpoint.socket.unlink()
    ended = threading.Timer(1.5, os.close, [lock])
    ended.start()
    client = Client(endpoint=endpoint)
    client.start()
    ended.join()
    assert client.status().generation == 0


@pytest.mark.long
def test_a_backend_that_nobody_can_reach_ends(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    client.endpoint.socket.unlink()
    assert_none_left(runtime)


def test_an_idle_backend_of_older_code_gives_way(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    wait_until(lambda: client.status().running is None, 5.0, "the request is over")
    with connect(client.endpoint, seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=Trial(name="echo", model=TWO_RANKS), program="another")))
        assert not sock.recv(1)
    assert_none_left(runtime)


def test_a_busy_backend_of_older_code_refuses(runtime: Path) -> None:
    client = start_fake(runtime)
    running = Running(client=client, message=sample()).in_step()
    with connect(client.endpoint, seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=Trial(name="echo", model=TWO_RANKS), program="another")))
        refusal = frames.recv_header(sock, deadline=deadlines.Deadline(5.0, "a refusal")).message
    assert "runs different code from this ComfyUI" in refusal.message
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)


def test_an_unload_reaches_ranks_of_a_layout_that_leaves_devices_out(runtime: Path) -> None:
    client = start_fake(runtime)
    four = Devices(kind="cpu", indices=(0, 1, 2, 3))
    model = ModelSpec(path="/none", devices=four, layout=ParallelLayout(ulysses=2))
    client.call(sample(spec=model), tensors(1))
    with pytest.raises(InvalidRequest, match="nothing to unload"):
        client.call(Unload(model=model))


def test_an_unload_whose_ranks_end_while_it_waits_starts_none(runtime: Path) -> None:
    client = start_fake(runtime)
    running = Running(client=client, message=sample()).in_step()
    with ThreadPoolExecutor() as pool:
        unload = pool.submit(client.call, Unload(model=TWO_RANKS))
        wait_until(lambda: client.status().queued, 5.0, "the unload waits")
        before = client.status()
        os.kill(before.ranks[1].pid, signal.SIGKILL)
        assert unload.result(10.0) == {}
    assert isinstance(running.ended(10.0), RankFailed)
    after = client.status()
    assert (after.ranks, after.generation) == ((), before.generation)


def test_a_client_of_replaced_files_says_that_comfyui_must_restart(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_backend.client.retry.is_outdated", lambda: True)
    endpoint = Endpoint(folder=runtime)
    lock, listener = listen(endpoint, backlog=1)

    def disconnect() -> None:
        listener.accept()[0].close()

    with listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(disconnect)
        with pytest.raises(BackendUnavailable, match="files have changed since ComfyUI started: restart ComfyUI"):
            Client(endpoint=endpoint).call(Trial(name="echo", model=TWO_RANKS))
        accepted.result(5.0)
    os.close(lock)


def test_an_unload_ends_an_idle_backend_of_older_code(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    wait_until(lambda: client.status().running is None, 5.0, "the request is over")
    with connect(client.endpoint, seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=Unload(model=TWO_RANKS), program="another")))
        assert frames.recv_header(sock, deadline=deadlines.Deadline(5.0, "an answer")).message == Done()
    assert_none_left(runtime)


def test_an_unload_starts_no_ranks_and_ends_none(runtime: Path) -> None:
    client = start_fake(runtime)
    elsewhere = ModelSpec(path="/other", devices=Devices(kind="cpu", indices=(4,)))
    client.call(Unload(model=TWO_RANKS))
    assert not client.status().ranks
    client.call(sample(), tensors(1))
    before = client.status()
    client.call(Unload(model=elsewhere))
    after = client.status()
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
