"""Spare ranks take the places of ranks, are counted and watched, and end with everything else."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from parallel_backend.client import query
from parallel_backend.client.client import Client
from parallel_backend.errors import RankFailed
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import connect
from parallel_backend.protocol.messages import Done, Expect, Stop
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.status import SpareStatus
from parallel_backend.supervisor.limits import Limits
from scripts import processes
from scripts.processes import wait_until

from .backend import IMPATIENT, Running, run_command, sample, start_fake, tensors
from .conftest import runtime_folder
from .fake_worker import DIES_AS_A_RANK, FAILS_TO_PREPARE, SLOW_TO_PREPARE
from .test_lifetime import assert_none_left

SPARES = replace(IMPATIENT, spares=2, idle=0.3)
THREE = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0, 1, 2)))


@pytest.fixture(scope="module")
def spared() -> Iterator[Client]:
    """The client of a fake backend with two spare ranks."""
    with runtime_folder() as folder:
        yield start_fake(folder, limits=SPARES)


def ready(client: Client, count: int = 2) -> set[int]:
    """Wait until this many spare ranks are ready and no others there; return their process ids."""

    def settled() -> tuple[SpareStatus, ...] | None:
        spares = client.status().spares
        return spares if len(spares) == count and all(spare.ready for spare in spares) else None

    return {spare.pid for spare in wait_until(settled, 60.0, f"{count} spare ranks are ready")}


def ranks(client: Client) -> list[int]:
    return [rank.pid for rank in client.status().ranks]


def elsewhere(first: int) -> ModelSpec:
    """A model on other devices, whose ranks take the place of those that there are."""
    return ModelSpec(path="/", devices=Devices(kind="cpu", indices=(first, first + 1)))


def supervisor_log(client: Client) -> str:
    return client.endpoint.log.read_text()


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_the_first_request_of_a_backend_uses_them(spared: Client) -> None:
    if not ranks(spared):
        pids = ready(spared)
        spared.call(sample(), tensors(2))
        assert set(ranks(spared)) == pids
    outputs = {os.readlink(f"/proc/{pid}/fd/{number}") for pid in ranks(spared) for number in (1, 2)}
    assert len(outputs) == 2, "each rank has a pipe of its own to its log"
    assert str(spared.endpoint.spare_log) not in outputs
    assert "Traceback" not in spared.endpoint.spare_log.read_text()


def test_a_request_that_is_expected_finds_them_before_the_backend_was_idle(runtime: Path) -> None:
    client = start_fake(runtime, limits=replace(SPARES, idle=600.0))
    assert client.status().spares == ()
    client.expect(THREE.devices.first(2))
    pids = ready(client)
    client.call(sample(), tensors(2))
    assert set(ranks(client)) == pids
    client.expect(THREE.devices.first(2))
    assert client.status().spares == (), "the ranks are there"
    running = Running(client=client, message=sample(), tensors=tensors(60)).in_step()
    client.expect(THREE.devices)
    assert client.status().spares == (), "others work"
    running.stop.set()
    running.ended(10.0)
    client.expect(THREE.devices)
    assert len(client.status().spares) == 2
    client.stop()


def test_a_backend_is_not_idle_while_a_request_is_expected(runtime: Path) -> None:
    client = start_fake(runtime, idle_timeout=3.0, limits=replace(SPARES, idle=600.0))
    for _ in range(6):
        query.ask(client.endpoint, Expect(devices=THREE.devices.first(2)), Done)
        time.sleep(1.0)
    assert len(client.status().spares) == 2
    assert_none_left(runtime, 20.0)


def test_a_request_of_another_program_is_not_expected(runtime: Path) -> None:
    client = start_fake(runtime, limits=replace(SPARES, idle=600.0))
    with connect(client.endpoint, seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=Expect(devices=THREE.devices), program="another")))
        assert frames.recv_header(sock, deadline=deadlines.Deadline(10.0, "an answer")).message == Done()
    assert client.status().spares == ()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.daily(1)
def test_they_take_the_places_of_a_killed_set(spared: Client, rank: int) -> None:
    spared.call(sample(), tensors(1))
    spares, before = ready(spared), ranks(spared)
    running = Running(client=spared, message=sample()).in_step()
    os.kill(before[rank], signal.SIGKILL)
    assert isinstance(running.ended(10.0), RankFailed)
    assert spared.call(sample(), tensors(2))
    assert set(ranks(spared)) == spares
    assert not ready(spared) & (spares | set(before))


def test_what_one_says_as_a_rank_is_in_the_log_of_the_rank(spared: Client) -> None:
    spares = ready(spared)
    error = Running(client=spared, message=sample("raise 1", spec=elsewhere(3))).ended(30.0)
    assert isinstance(error, RankFailed)
    assert any(f"rank 1 (pid {pid}) on cpu failed: KeyError: 'a bug'" in str(error) for pid in spares)
    assert "Traceback" in spared.endpoint.rank_log(1).read_text()


def test_a_set_of_more_ranks_uses_them(spared: Client) -> None:
    spares = ready(spared)
    spared.call(sample(spec=THREE), tensors(2))
    pids = ranks(spared)
    assert len(pids) == 3
    assert spares < set(pids)


def test_status_shows_them(spared: Client) -> None:
    pids = ready(spared)
    text = run_command(spared.endpoint.folder, "status").stdout
    assert "spares       2" in text
    for spare in spared.status().spares:
        assert abs(psutil.Process(spare.pid).memory_info().rss - spare.memory) < 0.2 * spare.memory
        assert f"  spare      pid {spare.pid}, ready, " in text
        assert spare.pid in pids


def test_a_stopped_one_goes_on_as_a_rank(spared: Client) -> None:
    pids = ready(spared)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    spared.call(sample(spec=elsewhere(5)), tensors(1))
    assert set(ranks(spared)) == pids


def test_dead_ones_are_replaced_and_leave_no_zombie_and_no_descriptor(spared: Client) -> None:
    supervisor = psutil.Process(spared.status().pid)
    pids, descriptors = ready(spared), supervisor.num_fds()
    for _ in range(3):
        victim = min(pids)
        os.kill(victim, signal.SIGKILL)
        said = f"spare rank (pid {victim}) was killed by SIGKILL"
        wait_until(partial(lambda text: text in supervisor_log(spared), said), 5.0, said)
        pids = ready(spared)
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in supervisor.children())
    # The connection of a status may still be closing, at either count.
    wait_until(lambda: supervisor.num_fds() <= descriptors, 5.0, "no descriptor is left over")


@pytest.mark.long
def test_all_at_once_may_die(spared: Client) -> None:
    """The next set starts without them, though the supervisor may not have noticed yet."""
    for pid in ready(spared):
        os.kill(pid, signal.SIGKILL)
    assert spared.call(sample(spec=elsewhere(7)), tensors(1))


def test_a_request_does_not_fail_because_of_them(spared: Client) -> None:
    ready(spared)
    before = spared.status().generation
    cause = spared.endpoint.folder / DIES_AS_A_RANK
    cause.touch()
    try:
        assert spared.call(sample(spec=elsewhere(9)), tensors(1))
    finally:
        cause.unlink()
    assert spared.status().generation == before + 2
    assert "exited with status 5 while starting" in supervisor_log(spared)


@pytest.mark.long
def test_requests_work_while_none_can_start_and_tries_become_rare(runtime: Path) -> None:
    (runtime / FAILS_TO_PREPARE).touch()
    client = start_fake(runtime, limits=SPARES)
    wait_until(lambda: "exited with status 1" in supervisor_log(client), 30.0, "a spare rank has failed")
    assert "ImportError: a broken package" in supervisor_log(client)
    assert client.call(sample(), tensors(2))
    time.sleep(6.0)
    assert 2 <= supervisor_log(client).count("ImportError: a broken package") <= 3
    (runtime / FAILS_TO_PREPARE).unlink()
    ready(client)


def test_one_that_imports_waits_while_a_request_runs(runtime: Path) -> None:
    (runtime / SLOW_TO_PREPARE).touch()
    client = start_fake(runtime, limits=replace(SPARES, idle=1.0))
    client.call(sample(), tensors(1))
    (spare,) = wait_until(lambda: client.status().spares, 10.0, "a spare rank starts")
    running = Running(client=client, message=sample()).in_step()
    assert stopped(spare.pid)
    assert len(client.status().spares) == 1
    running.stop.set()
    running.ended(10.0)
    wait_until(lambda: not stopped(spare.pid), 5.0, "it goes on")
    (runtime / SLOW_TO_PREPARE).unlink()
    assert spare.pid in ready(client)


def test_one_that_imports_is_taken_when_ranks_start(runtime: Path) -> None:
    (runtime / SLOW_TO_PREPARE).touch()
    client = start_fake(runtime, limits=SPARES)
    (spare,) = wait_until(lambda: client.status().spares, 10.0, "a spare rank starts")
    assert client.call(sample(), tensors(1))
    assert ranks(client)[0] == spare.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.daily(1)
def test_they_end_with_the_supervisor(runtime: Path, number: signal.Signals) -> None:
    """Those that are ready, the one that is importing, and one that is suspended."""
    client = start_fake(runtime, limits=replace(SPARES, spares=3))
    client.call(sample(), tensors(1))
    wait_until(lambda: sum(spare.ready for spare in client.status().spares) == 2, 60.0, "two are ready")
    (runtime / SLOW_TO_PREPARE).touch()
    victim = client.status().spares[0].pid
    os.kill(victim, signal.SIGKILL)
    Running(client=client, message=sample()).in_step()
    os.kill(client.status().pid, number)
    assert_none_left(runtime)


def test_they_end_with_an_idle_backend(runtime: Path) -> None:
    client = start_fake(runtime, idle_timeout=8.0, limits=SPARES)
    client.call(sample(), tensors(1))
    ready(client)
    assert_none_left(runtime, 20.0)


def test_a_stop_is_answered_once_they_are_gone(runtime: Path) -> None:
    client = start_fake(runtime, limits=SPARES)
    pids = ready(client)
    with connect(client.endpoint, seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=Stop())))
        assert frames.recv_header(sock, deadline=deadlines.Deadline(10.0, "an answer")).message == Done()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert_none_left(runtime)


def test_none_start_if_their_number_is_0(runtime: Path) -> None:
    client = start_fake(runtime, limits=Limits(spares=0, idle=0.1))
    client.call(sample(), tensors(1))
    time.sleep(1.5)
    assert client.status().spares == ()
    assert len(processes.processes_of(runtime)) == 3
