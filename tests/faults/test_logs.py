"""What is in the logs after requests and faults, and what is not."""

import os
import signal
import stat
from pathlib import Path

import pytest

from parallel_backend.client.client import Client
from parallel_backend.errors import InvalidRequest, RankFailed
from parallel_backend.protocol import request_log
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Trial
from scripts.processes import wait_until

from .backend import TWO_RANKS, Running, run_command, sample, start_fake, tensors
from .fake_worker import STEP


def logged(client: Client, count: int) -> list[request_log.RequestLine]:
    """Wait until this many requests have been logged, and return the last of them."""
    log = client.endpoint.request_log
    wait_until(lambda: len(list(request_log.read(log))) >= count, 10.0, f"{count} requests have been logged")
    return list(request_log.read(log))


def test_a_line_for_each_request(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(3))
    with pytest.raises(InvalidRequest):
        client.call(sample("refuse"), tensors(3))
    error = Running(client=client, message=sample("raise 1")).ended(30.0)
    assert isinstance(error, RankFailed)
    done, refused, failed = logged(client, 3)
    assert (done.kind, done.model, done.steps, done.outcome) == ("Sample", "model", 3, "done")
    assert {"starting", "running", "sampling", "replying", "receiving"} <= set(done.seconds)
    assert 3 * STEP <= done.seconds["sampling"] <= 0.25
    assert done.seconds["sampling"] <= done.seconds["running"]
    assert done.received == 24 + 16
    assert done.sent == 24 + 3 * 24  # the result, and a preview in each step
    assert "starting" not in refused.seconds
    assert (refused.outcome, failed.outcome) == ("invalid_request", "rank_failed")
    shown = run_command(runtime, "logs").stdout
    assert shown.startswith(f"{client.endpoint.logs}\n")
    assert shown.count("Sample") == 3


def test_the_log_of_a_rank_outlives_recoveries(client: Client) -> None:
    pids = []
    for _ in range(3):
        running = Running(client=client, message=sample()).in_step()
        pids.append(client.status().ranks[1].pid)
        os.kill(pids[-1], signal.SIGSEGV)
        error = running.ended(10.0)
        assert isinstance(error, RankFailed)
        assert "was killed by SIGSEGV: Segmentation fault in File " in str(error)
        assert f"(log: {client.endpoint.rank_log(1)})" in str(error)
    client.call(sample(), tensors(1))
    log = client.endpoint.rank_log(1)
    wait_until(lambda: log.read_text().count("Fatal Python error: Segmentation fault") == 3, 5.0, "all is written")


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "stopped")])
@pytest.mark.daily(1)
def test_the_last_lines_reach_the_error(client: Client, number: signal.Signals, how: str) -> None:
    running = Running(client=client, message=sample("talk 1")).in_step()
    wait_until(lambda: "its last words" in client.endpoint.rank_log(1).read_text(), 10.0, "rank 1 has spoken")
    os.kill(client.status().ranks[1].pid, number)
    error = running.ended(15.0)
    assert isinstance(error, RankFailed)
    assert how in str(error)
    assert 'its last words"' in str(error)
    assert len(str(error)) < 1000


def test_everything_is_private(client: Client) -> None:
    client.call(sample(), tensors(1))
    logged(client, 1)
    files = {path: stat.S_IMODE(path.lstat().st_mode) for path in client.endpoint.folder.rglob("*")}
    folders = {path for path in files if path.is_dir()}
    assert folders == {client.endpoint.logs}
    assert files[client.endpoint.logs] == 0o700
    assert {files[path] for path in files.keys() - folders} == {0o600}
    assert {"rank0.log", "rank1.log", "requests.log", "start.log"} <= {path.name for path in files}
    assert f"logs         {client.endpoint.logs}\n" in run_command(client.endpoint.folder, "status").stdout


@pytest.mark.parametrize("log", ["rank0.log", "requests.log"])
@pytest.mark.daily(1)
def test_a_log_that_cannot_be_written_ends_nothing(runtime: Path, log: str) -> None:
    logs = runtime / "logs"
    (logs / log).mkdir(parents=True)
    logs.chmod(0o700)
    client = start_fake(runtime)
    for _ in range(2):
        client.call(sample(), tensors(1))
    wait_until(lambda: client.status().log_problem, 10.0, "the status tells")
    assert "missing: Is a directory" in client.status().log_problem
    running = Running(client=client, message=sample()).in_step()
    os.kill(client.status().ranks[1].pid, signal.SIGKILL)
    assert isinstance(running.ended(10.0), RankFailed)
    client.call(sample(), tensors(1))


def test_an_unwritable_folder_of_logs_ends_nothing(runtime: Path) -> None:
    (runtime / "logs").write_text("a file")
    client = Client(endpoint=Endpoint(folder=runtime))
    client.start()
    assert client.call(Trial(name="exchange", model=TWO_RANKS, amount=4))
    assert "missing: " in client.status().log_problem
    client.stop()


def test_logs_elsewhere(runtime: Path, tmp_path: Path) -> None:
    started = run_command(runtime, "serve", "--detach", PARALLEL_DIT_LOGS=str(tmp_path / "kept"))
    assert started.returncode == 0, started.stderr
    client = Client(endpoint=Endpoint(folder=runtime))
    assert client.status().logs == str(tmp_path / "kept")
    wait_until((tmp_path / "kept" / "backend.log").exists, 10.0, "the log is there")
    assert not (runtime / "logs").exists()


def test_an_exchange_between_the_ranks(runtime: Path) -> None:
    client = Client(endpoint=Endpoint(folder=runtime))
    reply = client.call(Trial(name="exchange", model=TWO_RANKS, amount=64 << 20))
    assert 0.0 < float(reply["latency"]) < float(reply["seconds"]) < 10.0
    for nbytes in (0, 1 << 40):
        with pytest.raises(InvalidRequest, match=f"{nbytes} bytes between 2 ranks"):
            client.call(Trial(name="exchange", model=TWO_RANKS, amount=nbytes))
    with pytest.raises(InvalidRequest, match="there is no trial 'echo': 'exchange' would work"):
        client.call(Trial(name="echo", model=TWO_RANKS))  # the lab's ranks alone know it
    client.stop()
