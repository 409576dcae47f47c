"""What a request, and the next one, return when a rank dies, hangs or raises."""

import os
import signal

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import BackendFailure, InvalidRequest, OutOfMemory, RankFailed
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from scripts import processes
from scripts.processes import wait_until
from tests.support import device_errors

from .backend import Running, sample, tensors
from .fake_worker import FAILS_TO_START


def works(client: Client) -> bool:
    result = client.call(sample(), tensors(2))
    return torch.equal(result["samples"], tensors(2)["x"] * 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.daily(1)
def test_a_killed_rank_is_named_and_the_next_request_works(client: Client, rank: int) -> None:
    running = Running(client=client, message=sample()).in_step()
    before = client.status()
    pid = before.ranks[rank].pid
    os.kill(pid, signal.SIGKILL)
    error = running.ended(10.0)
    assert isinstance(error, RankFailed)
    assert f"rank {rank} (pid {pid}) was killed by SIGKILL" in str(error)
    assert works(client)
    after = client.status()
    assert after.generation == before.generation + 1
    left = {process.pid for process in processes.processes_of(client.endpoint.folder)}
    assert not left & {status.pid for status in before.ranks}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.daily(1)
def test_a_stopped_rank_is_found(client: Client, rank: int) -> None:
    running = Running(client=client, message=sample()).in_step()
    pid = client.status().ranks[rank].pid
    os.kill(pid, signal.SIGSTOP)
    error = running.ended(10.0)
    assert isinstance(error, RankFailed)
    assert f"rank {rank} (pid {pid}) stopped answering" in str(error)
    assert works(client)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.daily(1)
def test_a_rank_that_raises_is_named_with_its_exception(client: Client, rank: int) -> None:
    error = Running(client=client, message=sample(f"raise {rank}")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert f"rank {rank} (pid " in str(error)
    assert "KeyError: 'a bug'" in str(error)
    log = client.endpoint.rank_log(rank)
    assert str(log) in str(error)
    assert "Traceback" in log.read_text()
    assert works(client)


def test_a_rank_that_raises_after_the_answer_is_replaced(client: Client) -> None:
    assert client.call(sample("late 1"), tensors(3))
    wait_until(lambda: not client.status().ranks, 5.0, "the set has ended")
    assert works(client)


@pytest.mark.parametrize("name", ["torch", "cuda", "nccl"])
@pytest.mark.daily(1)
def test_a_full_device_is_named(client: Client, name: str) -> None:
    error = Running(client=client, message=sample(f"torch 1 FULL/{name}")).ended(30.0)
    assert isinstance(error, OutOfMemory)
    assert "rank 1 (pid " in str(error)
    assert "on cpu ran out of memory: " in str(error)
    assert device_errors.FULL[name].text[:20] in str(error)
    assert works(client)


def test_a_lost_peer_is_no_full_device(client: Client) -> None:
    error = Running(client=client, message=sample("torch 1 PEER/lost")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert "Connection closed by remote peer" in str(error)
    assert works(client)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("name", ["OWN/illegal address", "OWN/nccl", "OWN/small /dev/shm"])
@pytest.mark.daily(2)
def test_a_rank_whose_device_fails_is_named_though_others_notice_first(client: Client, name: str, culprit: int) -> None:
    """Its process, which cannot use its device any more, and those of all other ranks are replaced."""
    running = Running(client=client, message=sample(f"blame {culprit} {name}")).in_step()
    before = client.status()
    error = running.ended(30.0)
    assert type(error) is RankFailed
    assert f"rank {culprit} (pid {before.ranks[culprit].pid}) on cpu failed: " in str(error)
    assert works(client)
    assert not {rank.pid for rank in client.status().ranks} & {rank.pid for rank in before.ranks}


def test_a_rank_with_a_full_device_is_named_though_others_notice_first(client: Client) -> None:
    error = Running(client=client, message=sample("blame 1 FULL/nccl")).ended(30.0)
    assert isinstance(error, OutOfMemory)
    assert "rank 1 (pid " in str(error)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.daily(1)
def test_a_rank_that_the_watchdog_ends_is_not_blamed_for_another(client: Client, culprit: int) -> None:
    error = Running(client=client, message=sample(f"accuse {culprit} OWN/launch failure")).ended(30.0)
    assert type(error) is RankFailed
    assert f"rank {culprit} (pid " in str(error)
    assert "unspecified launch failure" in str(error)
    assert works(client)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("OWN/watchdog", RankFailed, "terminated with exception: CUDA error: an illegal memory access was encountered"),
        ("PEER/timeout", RankFailed, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "),
        ("PEER/watchdog", RankFailed, "remote process exited or there was a network error"),
        ("FULL/nccl", OutOfMemory, "Last error: Cuda failure 2 'out of memory'"),
    ],
)
@pytest.mark.daily(2)
def test_a_rank_that_aborts_is_named_with_the_reason(
    client: Client, name: str, kind: type[BackendFailure], said: str
) -> None:
    error = Running(client=client, message=sample(f"abort 1 {name}")).ended(30.0)
    assert type(error) is kind
    assert "rank 1 (pid " in str(error)
    assert "was killed by SIGABRT: " in str(error)
    assert said in str(error)
    assert "frame #" not in str(error)
    assert works(client)


@pytest.mark.parametrize(("name", "kind"), [("OWN/two ranks on a card", RankFailed), ("FULL/nccl", OutOfMemory)])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.daily(1)
def test_a_rank_that_cannot_start_is_named_though_others_notice_first(
    client: Client, name: str, kind: type[BackendFailure], culprit: int
) -> None:
    cause = client.endpoint.folder / FAILS_TO_START
    cause.write_text(f"{culprit} {name}")
    three = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0, 1, 2)))
    try:
        error = Running(client=client, message=sample(spec=three)).ended(60.0)
    finally:
        cause.unlink()
    assert type(error) is kind
    assert f"rank {culprit} (pid " in str(error)
    assert " while starting: " in str(error)
    assert works(client)


def test_a_rank_that_exits_is_named(client: Client) -> None:
    error = Running(client=client, message=sample("exit 1")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert "rank 1" in str(error)
    assert "exited with status 3" in str(error)
    error = Running(client=client, message=sample("quit 1")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert "rank 1" in str(error)
    assert "SystemExit: 4" in str(error)


def test_a_refusal_by_one_rank_alone_does_not_hang_the_others(client: Client) -> None:
    error = Running(client=client, message=sample("alone 1")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert "rank 1 alone ended the request: only I think so" in str(error)
    assert works(client)


def test_the_next_request_does_not_meet_ranks_that_wait_in_one_that_rank_0_refused(client: Client) -> None:
    assert works(client)
    before = client.status().generation
    with pytest.raises(InvalidRequest, match="only I think so"):
        client.call(sample("alone 0"), tensors(6))
    answer = client.call(sample(), tensors(6))["samples"]
    assert torch.equal(answer, tensors(6)["x"] * 2)
    assert client.status().generation == before + 1
    log = client.endpoint.log.read_text()
    assert "rank 1 has not ended a request that rank 0 has ended: only I think so" in log


def test_a_refused_request_leaves_the_ranks_as_they_are(client: Client) -> None:
    assert works(client)
    before = client.status()
    with pytest.raises(InvalidRequest, match="this request cannot work"):
        client.call(sample("refuse"), tensors(2))
    assert works(client)
    after = client.status()
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]


def test_an_idle_rank_that_dies_costs_nobody_a_request(client: Client) -> None:
    assert works(client)
    os.kill(client.status().ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: not client.status().ranks, 5.0, "the set has ended")
    assert works(client)


def test_a_worker_that_cannot_start_says_why(client: Client) -> None:
    gpu = ModelSpec(path="/", devices=Devices(kind="cuda", indices=(0,)))
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    error = Running(client=client, message=sample(spec=gpu)).ended(60.0)
    assert isinstance(error, RankFailed)
    assert "while starting" in str(error)
    assert str(client.endpoint.rank_log(0)) in str(error)
    assert works(client)


def test_fewer_devices_reuse_the_ranks_and_more_start_new_ones(client: Client) -> None:
    assert works(client)
    pids = [rank.pid for rank in client.status().ranks]
    one = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0,)))
    client.call(sample(spec=one), tensors(2))
    assert [rank.pid for rank in client.status().ranks] == pids
    three = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0, 1, 2)))
    client.call(sample(spec=three), tensors(2))
    status = client.status()
    assert len(status.ranks) == 3
    assert not {rank.pid for rank in status.ranks} & set(pids)


def test_a_long_error_is_cut_and_the_log_outlives_the_next_start(client: Client) -> None:
    error = Running(client=client, message=sample("shout 1")).ended(30.0)
    assert isinstance(error, RankFailed)
    assert "KeyError: 'aaaa" in str(error)
    assert len(str(error)) < 5000
    assert works(client)
    assert "Traceback" in client.endpoint.rank_log(1).read_text()
