"""A runtime folder that cannot be used as it is, because of its disk or of what a dead process has left there."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import BackendUnavailable
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Trial
from scripts import processes
from scripts.processes import wait_until

from .backend import TWO_RANKS, environment, run_command, sample, start_fake, tensors

ONE_ECHO = Trial(name="echo", model=TWO_RANKS)


def private_mounts(*commands: str) -> list[str]:
    """Return the beginning of a command that runs with mounts of its own, which ``commands`` make; skip without."""
    script = " && ".join([*commands, 'exec "$@"'])
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this user cannot mount here: {tried.stderr.strip()}")
    return command


@contextlib.contextmanager
def immutable(runtime: Path) -> Iterator[None]:
    changed = subprocess.run(["chattr", "+i", str(runtime)], capture_output=True, text=True, check=False)
    if changed.returncode:
        pytest.skip(f"chattr does not work here: {changed.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(runtime)], check=True)


@contextlib.contextmanager
def folder_for_lock(runtime: Path) -> Iterator[None]:
    (runtime / "lock").mkdir()
    yield


@contextlib.contextmanager
def folder_for_socket(runtime: Path) -> Iterator[None]:
    (runtime / "socket").mkdir()
    yield


@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        (immutable, "lock cannot be made: Operation not permitted"),
        (folder_for_lock, "lock cannot be made: Is a directory"),
        (folder_for_socket, "socket cannot be made: Is a directory"),
    ],
)
@pytest.mark.daily(1)
def test_a_folder_that_takes_no_backend_is_named_with_the_reason(
    runtime: Path, refuses: Callable[[Path], contextlib.AbstractContextManager[None]], said: str
) -> None:
    client = Client(endpoint=Endpoint(folder=runtime))
    with refuses(runtime), pytest.raises(BackendUnavailable) as caught:
        client.call(ONE_ECHO)
    assert f"exited with status 1: {runtime}/{said}; make room" in str(caught.value)
    assert "set PARALLEL_DIT_RUNTIME to another folder" in str(caught.value)
    assert ("log:" in str(caught.value)) == client.endpoint.start_log.exists()


def test_a_read_only_disk_is_named(runtime: Path) -> None:
    mounted = private_mounts(f"mount --bind {runtime} {runtime}", f"mount -o remount,ro,bind {runtime}")
    command = [*mounted, sys.executable, "-m", "parallel_backend", "serve", "--detach"]
    done = subprocess.run(command, env=environment(runtime), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{runtime}/lock cannot be made: Read-only file system" in done.stderr


def test_a_full_shared_memory_is_no_obstacle_to_cpu_ranks(runtime: Path) -> None:
    """A rank on a CPU has no use for it. What NCCL says of a small one is in ``test_ranks_fail.py``."""
    full = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    client = start_fake(runtime, prefix=private_mounts(full))
    assert torch.equal(client.call(sample(), tensors(3))["samples"], tensors(3)["x"] * 2)
    for rank in client.status().ranks:
        assert os.statvfs(f"/proc/{rank.pid}/root/dev/shm").f_bavail == 0


def test_what_a_dead_backend_leaves_is_no_obstacle(runtime: Path) -> None:
    client = start_fake(runtime)
    client.call(sample(), tensors(1))
    endpoint = client.endpoint
    wait_until(
        lambda: endpoint.request_log.exists() and endpoint.request_log.read_text(), 10.0, "the request is logged"
    )
    os.kill(client.status().pid, signal.SIGKILL)
    assert processes.wait_for_exit(runtime, 10.0) == []
    assert {path.name for path in runtime.iterdir()} == {"socket", "lock", "logs"}
    assert run_command(runtime, "status").stderr == f"no backend answers at {endpoint.socket}\n"
    before = endpoint.request_log.read_text()
    assert start_fake(runtime).call(sample(), tensors(1))
    wait_until(lambda: endpoint.request_log.read_text() != before, 10.0, "another request is logged")
    assert endpoint.request_log.read_text().startswith(before)
