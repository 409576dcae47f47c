"""What one connection or rank brings cannot end the loop that serves the others."""

import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_backend.client import query
from parallel_backend.errors import BackendFailure
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import Endpoint, connect, listen
from parallel_backend.protocol.messages import MESSAGES, Error, Outcome, RankRequest, Unload
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.supervisor.event_loop import READ, EventLoop
from parallel_backend.supervisor.listener import Listener
from parallel_backend.supervisor.ranks.rank_set import RankSet
from parallel_backend.supervisor.supervisor import Supervisor

SPEC = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0,)))


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pdit"))
    yield path
    shutil.rmtree(path)


def test_an_exception_discards_its_descriptor_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    events, discarded, served = EventLoop(), list[Exception](), list[bytes]()
    bad, sender = socket.socketpair()
    good, other = socket.socketpair()

    def fail() -> None:
        raise LookupError("unexpected")

    with bad, sender, good, other:
        events.watch(bad.fileno(), READ, fail, discard=discarded.append)
        events.watch(good.fileno(), READ, lambda: served.append(good.recv(1)), discard=discarded.append)
        for sock in (sender, other):
            sock.send(b"x")
        events.run_once(1.0)
        other.send(b"y")
        events.run_once(1.0)
        assert served == [b"x", b"y"]
        assert [str(error) for error in discarded] == ["unexpected"]
        assert events.internal_errors == 1
    assert "LookupError: unexpected" in caplog.text
    assert "in fail" in caplog.text  # the trace


def test_a_discard_that_fails_is_counted_too() -> None:
    events, (bad, sender) = EventLoop(), socket.socketpair()

    def fail(*_: object) -> None:
        raise LookupError("unexpected")

    with bad, sender:
        events.watch(bad.fileno(), READ, fail, discard=fail)
        sender.send(b"x")
        events.run_once(1.0)
        events.run_once(0.0)
    assert events.internal_errors == 2


def test_a_descriptor_that_takes_the_number_of_a_closed_one_does_not_get_its_event() -> None:
    events, (first, first_sender), (second, second_sender) = EventLoop(), socket.socketpair(), socket.socketpair()
    called, replaced = list[str](), list[socket.socket]()

    def replace(old: socket.socket) -> None:
        """Close a descriptor that has an event, and watch a new one with its number."""
        if replaced:
            return
        number = old.fileno()
        events.forget(number)
        old.close()
        replaced.extend(socket.socketpair())
        assert number in [sock.fileno() for sock in replaced]
        events.watch(number, READ, lambda: called.append("new"), discard=lambda error: None)

    events.watch(first.fileno(), READ, lambda: replace(second), discard=lambda error: None)
    events.watch(second.fileno(), READ, lambda: replace(first), discard=lambda error: None)
    for sender in (first_sender, second_sender):
        sender.send(b"x")
    events.run_once(1.0)
    assert replaced
    assert called == []
    assert events.internal_errors == 0
    for sock in (first, first_sender, second, second_sender, *replaced):
        sock.close()


@pytest.fixture
def serving(folder: Path) -> Iterator[Callable[[], Supervisor]]:
    """Start a supervisor in a thread of this process, so that a test can plant bugs in it."""
    started: list[tuple[Supervisor, threading.Thread]] = []

    def start() -> Supervisor:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        supervisor = Supervisor(endpoint=Endpoint(folder=folder), idle_timeout=0.0, command=command)
        thread = threading.Thread(target=supervisor.serve, daemon=True)
        thread.start()
        started.append((supervisor, thread))
        return supervisor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # only the main thread may set handlers
        yield start
    for supervisor, thread in started:
        supervisor._stopping = supervisor._stopping or []
        thread.join(20.0)
        assert not thread.is_alive()


def sent(folder: Path, message: object) -> Any:
    """Send a message; return what is answered first."""
    with connect(Endpoint(folder=folder), seconds=5.0) as sock:
        sock.sendall(frames.pack(frames.Frame(message=message)))
        return frames.recv_header(sock, deadline=deadlines.Deadline(5.0, "an answer")).message


def test_a_bug_in_an_answer_closes_that_connection_alone(
    folder: Path, serving: Callable[[], Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = serving()

    def fail(request_id: str) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(supervisor._queue, "outcome", fail)
    answer = sent(folder, Outcome(request_id="a"))
    assert answer == Error(
        code=BackendFailure.code,
        message="the backend failed on this message: LookupError: a bug; backend.log has the trace",
    )
    assert query.status(Endpoint(folder=folder)).internal_errors == 1


@pytest.mark.parametrize("place", ["start", "run"])
def test_a_bug_in_starting_a_request_ends_that_request_alone(
    folder: Path, serving: Callable[[], Supervisor], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    supervisor = serving()

    def fail(*_: object) -> None:
        raise LookupError("a bug")

    if place == "start":
        monkeypatch.setattr(supervisor._generations, "start", fail)
    else:
        monkeypatch.setattr(supervisor._queue, "take", fail)
        monkeypatch.setattr(RankSet, "ready", True)
    with connect(Endpoint(folder=folder), seconds=5.0) as sock:
        message = RankRequest(model=SPEC)
        monkeypatch.setitem(MESSAGES, "RankRequest", RankRequest)
        sock.sendall(frames.pack(frames.Frame(message=message)))
        deadline = deadlines.Deadline(5.0, "an answer")
        answers = [frames.recv_header(sock, deadline=deadline).message for _ in range(2)]
    assert answers[1] == Error(code=BackendFailure.code, message="the backend failed: LookupError: a bug")
    status = query.status(Endpoint(folder=folder))
    assert (status.queued, status.running, status.internal_errors) == ((), None, 1)
    assert sent(folder, Unload(model=SPEC)) is not None


def test_a_bug_without_any_request_ends_the_supervisor(
    folder: Path, serving: Callable[[], Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client is its cause. A fresh backend is better than one that fails four times a second."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    supervisor = serving()
    monkeypatch.setattr(supervisor._listener, "tick", lambda: 1 / 0)
    deadline = time.monotonic() + 10.0
    while Endpoint(folder=folder).socket.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_unexpected_error_of_accept_is_counted_and_rested_from(folder: Path) -> None:
    events = EventLoop()
    lock, listening = listen(Endpoint(folder=folder), backlog=1)

    def fail(sock: socket.socket) -> int:
        raise OSError(errno.EIO, "a bug")

    listener = Listener(
        listener=listening, uid=os.getuid(), events=events, on_frame=lambda *_: None, pause=0.2, uid_of=fail
    )
    with connect(Endpoint(folder=folder), seconds=1.0):
        events.run_once(1.0)
        assert events.internal_errors == 1
    with connect(Endpoint(folder=folder), seconds=1.0):
        events.run_once(0.0)
        assert events.internal_errors == 1, "it rests"
        time.sleep(0.25)
        listener.tick()
        events.run_once(1.0)
        assert events.internal_errors == 2
    listener.close()
    os.close(lock)
