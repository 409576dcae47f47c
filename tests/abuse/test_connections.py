"""Connections that say nothing, or are too many: `status` answers meanwhile, and a request runs."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client import query
from parallel_backend.client.client import Client
from parallel_backend.errors import BackendError, Cancelled, DeadlineExceeded, QueueFull
from parallel_backend.protocol import frames
from parallel_backend.protocol.endpoint import connect
from parallel_backend.protocol.messages import Error, Progress, Trial
from parallel_backend.protocol.status import Status, StatusQuery
from scripts.processes import wait_until
from tests.faults.backend import TWO_RANKS, Running, sample, start_fake

from .raw import ECHO, SECONDS, answers, frame, header

NOBODY = 65534
AS_NOBODY = f"""
import os, socket
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sock = socket.socket(socket.AF_UNIX)
sock.connect("socket")
sock.sendall(b"x")
print(sock.recv(9))
"""


@contextlib.contextmanager
def idle_connections(client: Client, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing until the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(client.endpoint, seconds=SECONDS)) for _ in range(count)]


def answered_in(client: Client) -> float:
    """Return how many seconds `status` takes."""
    start = time.monotonic()
    query.status(client.endpoint, seconds=SECONDS)
    return time.monotonic() - start


def test_two_hundred_idle_connections_keep_nothing_from_being_answered(client: Client) -> None:
    with idle_connections(client, 200) as connections:
        assert max(answered_in(client) for _ in range(20)) < 1.0
        assert client.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(3)})
        # The oldest made room; the newest are still waited for.
        refused = answers(connections[0])
        assert refused == Error(code="queue_full", message="more than 64 connections are waiting to be read")
        connections[-1].sendall(frames.pack(frames.Frame(message=StatusQuery())))
        assert isinstance(answers(connections[-1]), Status)


def test_connections_that_keep_coming_keep_nothing_from_being_answered(client: Client) -> None:
    """Others connect as fast as they can, and say nothing."""
    ended, opened = threading.Event(), 0

    def flood() -> None:
        nonlocal opened
        kept: list[socket.socket] = []
        while not ended.is_set():
            with contextlib.suppress(BackendError):
                kept.append(connect(client.endpoint, seconds=SECONDS))
                opened += 1
            for sock in kept[:-100]:
                sock.close()
            del kept[:-100]
        for sock in kept:
            sock.close()

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    try:
        assert max(answered_in(client) for _ in range(30)) < 2.0
        assert client.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(3)})
    finally:
        ended.set()
        for thread in flooding:
            thread.join(10)
    assert opened > 200


def test_a_byte_a_second_is_not_waited_for(client: Client) -> None:
    """The header would be complete after many minutes."""
    sent, start = frame(header("StatusQuery", {})), time.monotonic()
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.settimeout(1.0)
        for byte in sent:
            with contextlib.suppress(BrokenPipeError):
                sock.send(bytes([byte]))
            try:
                peeked = sock.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                continue
            break
        assert peeked
        assert answers(sock) == Error(code="deadline", message="the message did not arrive within 10 s")
    assert 9.0 < time.monotonic() - start < 15.0


def test_a_request_cut_into_bytes_is_a_request(client: Client) -> None:
    with connect(client.endpoint, seconds=SECONDS) as sock:
        for byte in frame(header()):
            sock.send(bytes([byte]))
        kinds = [type(answers(sock)).__name__ for _ in range(4)]
    assert kinds == ["Progress", "Continue", "Progress", "Done"]


def test_a_flood_of_requests_is_refused_and_takes_no_memory(client: Client) -> None:
    """Each header is as large as can be. 16 wait, and the others are told so."""
    running = Running(client=client, message=sample()).in_step()
    large = frame(header(body={**ECHO, "model": {**ECHO["model"], "stamp": "x" * 120_000}}))
    answered: list[str] = []
    before = client.status().memory
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(connect(client.endpoint, seconds=SECONDS))
            sock.sendall(large)
            answer = answers(sock)
            answered.append(answer.code if isinstance(answer, Error) else answer.phase)
        assert answered == ["queued"] * 16 + [QueueFull.code] * 284
        assert len(client.status().queued) == 16
        assert client.status().memory - before < 16 << 20
    wait_until(lambda: not client.status().queued, 5.0, "requests whose clients have gone are forgotten")
    running.stop.set()
    assert isinstance(running.ended(5.0), Cancelled)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_gets_nowhere(client: Client) -> None:
    """Neither through the modes of folder and socket, nor, where they are wrong, through the check of the user."""
    folder = client.endpoint.folder

    def act() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", AS_NOBODY], cwd=folder, capture_output=True, text=True, timeout=20.0, check=False
        )

    assert "PermissionError" in act().stderr
    try:
        folder.chmod(0o755)
        assert "PermissionError" in act().stderr
        client.endpoint.socket.chmod(0o666)
        done = act()
        assert done.stdout == "b''\n" or "BrokenPipeError" in done.stderr or "ConnectionResetError" in done.stderr
    finally:
        client.endpoint.socket.chmod(0o600)
        folder.chmod(0o700)
    refused = f"refused a connection from user {NOBODY}"
    wait_until(lambda: refused in client.endpoint.log.read_text(), 5.0, "a thread writes it into the log")


def test_without_descriptors_the_supervisor_lives_and_serves_again(client: Client) -> None:
    """With idle connections, of which the oldest makes room."""
    with few_descriptors(client, spare=8), idle_connections(client, 50):
        assert answered_in(client) < 1.0
        assert client.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(3)})


def test_without_any_descriptor_connections_wait_and_nothing_spins(runtime: Path) -> None:
    """While a request runs and others wait for it.

    The supervisor is new: other tests leave more gaps between its descriptors than its queue can fill.
    """
    client = start_fake(runtime)
    running = Running(client=client, message=sample()).in_step()
    pid = client.status().pid
    with queued_requests(client, pid), few_descriptors(client, spare=0):
        supervisor = psutil.Process(pid)
        busy, start = sum(supervisor.cpu_times()[:2]), time.monotonic()
        with pytest.raises(DeadlineExceeded):
            query.status(client.endpoint, seconds=2.0)
        busy, elapsed = sum(supervisor.cpu_times()[:2]) - busy, time.monotonic() - start
        assert busy < 0.25 * elapsed
    assert answered_in(client) < 2.0
    assert "a connection is not accepted: [Errno 24]" in client.endpoint.log.read_text()
    running.stop.set()
    assert isinstance(running.ended(5.0), Cancelled)


@contextlib.contextmanager
def queued_requests(client: Client, pid: int) -> Iterator[None]:
    """Queue requests until the supervisor's descriptors are 0 to some number, without a gap.

    A limit of its descriptors is then not below their number, at which poll(2) would fail.
    """
    used = _settled_descriptors(pid)
    with contextlib.ExitStack() as stack:
        for _ in set(range(max(used))) - used:
            sock = stack.enter_context(connect(client.endpoint, seconds=SECONDS))
            sock.sendall(frame(header()))
            answer = answers(sock)
            assert isinstance(answer, Progress)
            assert answer.phase == "queued"
        yield


def _settled_descriptors(pid: int) -> set[int]:
    """Return a process's descriptors, once those of earlier connections are closed."""
    before: set[int] = set()
    while (now := {int(name) for name in os.listdir(f"/proc/{pid}/fd")}) != before:
        before = now
        time.sleep(0.5)
    return now


@contextlib.contextmanager
def few_descriptors(client: Client, *, spare: int) -> Iterator[None]:
    """Let the supervisor open only ``spare`` more descriptors."""
    pid = client.status().pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = _settled_descriptors(pid)
    free = (number for number in range(soft) if number not in used)
    limit = [next(free) for _ in range(spare + 1)][-1]  # the first that it may not have
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
