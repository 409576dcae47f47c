"""The runtime folder, the lock, and who may connect."""

import logging
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_backend.errors import BackendUnavailable, DeadlineExceeded
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import Endpoint, connect, listen, passed_over, peer
from parallel_backend.protocol.messages import Error
from parallel_backend.protocol.private_file import is_private
from parallel_backend.protocol.status import StatusQuery
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.listener import Listener


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pdit"))
    yield path
    shutil.rmtree(path)


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PARALLEL_DIT_RUNTIME", str(folder / "mine"))
    assert Endpoint.default().folder == folder / "mine"
    monkeypatch.delenv("PARALLEL_DIT_RUNTIME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert Endpoint.default().folder == folder / "parallel-dit"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "not-there"))
    assert Endpoint.default().folder == Path(f"/tmp/parallel-dit-{os.getuid()}")


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        ("/proc", "the runtime folder /proc/parallel-dit cannot be created"),
        ("/tmp/" + "x" * 115, "is not there"),
        ("relative", "relative is no absolute path"),
    ],
)
def test_a_folder_that_cannot_be_is_passed_over_and_said(
    monkeypatch: pytest.MonkeyPatch, session: str, reason: str
) -> None:
    monkeypatch.delenv("PARALLEL_DIT_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    endpoint = Endpoint.default()
    assert endpoint.folder == Path(f"/tmp/parallel-dit-{os.getuid()}")
    said = passed_over(endpoint)
    assert said.startswith(f"the runtime folder is {endpoint.folder}, not one in XDG_RUNTIME_DIR: ")
    assert reason in said
    monkeypatch.setenv("PARALLEL_DIT_RUNTIME", str(endpoint.folder))  # as its supervisor has it
    assert passed_over(Endpoint.default()) == said


def test_a_folder_whose_path_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("PARALLEL_DIT_RUNTIME", raising=False)
    session = folder / ("x" * 120)
    session.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    endpoint = Endpoint.default()
    assert endpoint.folder == Path(f"/tmp/parallel-dit-{os.getuid()}")
    assert "is longer than 107 bytes, the limit for a Unix socket" in passed_over(endpoint)
    assert list(session.iterdir()) == []


def test_nothing_is_passed_over_where_the_folder_can_be(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("PARALLEL_DIT_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert passed_over(Endpoint.default()) == ""
    assert passed_over(Endpoint(folder=folder / "another")) == ""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert passed_over(Endpoint.default()) == ""


def test_a_chosen_folder_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DIT_RUNTIME", "/proc/there")
    with pytest.raises(BackendUnavailable, match=r"/proc/there cannot be created .*: set PARALLEL_DIT_RUNTIME to"):
        connect(Endpoint.default(), seconds=1)


def test_folder_and_socket_are_private(folder: Path) -> None:
    endpoint = Endpoint(folder=folder / "a" / "b")
    lock, listener = listen(endpoint, backlog=1)
    with listener:
        assert stat.S_IMODE(endpoint.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(endpoint.socket.stat().st_mode) == 0o600
    os.close(lock)


def test_a_folder_that_others_may_read_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="mode 0700"):
        connect(Endpoint(folder=folder), seconds=1)


@pytest.mark.parametrize(
    ("mode", "others", "private"),
    [(0o40700, False, True), (0o40500, False, True), (0o40700, True, False), (0o40710, False, False),
     (0o40702, False, False), (0o120700, False, False), (0o100700, False, False)],
)  # fmt: skip
def test_a_folder_is_private_if_this_user_owns_it_and_nobody_else_enters(
    mode: int, others: bool, private: bool
) -> None:
    assert is_private(os.stat_result((mode, 1, 1, 1, os.getuid() + others, 0, 0, 0, 0, 0))) == private


def test_a_link_to_a_folder_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(BackendUnavailable, match="must be a folder that you own"):
        connect(Endpoint(folder=folder / "link"), seconds=1)


def test_a_path_that_is_too_long_for_a_socket(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="set PARALLEL_DIT_RUNTIME to a shorter folder"):
        connect(Endpoint(folder=folder / ("x" * 100)), seconds=1)


def test_an_endpoint_has_one_supervisor_and_a_stale_socket_is_replaced(folder: Path) -> None:
    endpoint = Endpoint(folder=folder)
    lock, listener = listen(endpoint, backlog=1)
    with pytest.raises(BackendUnavailable, match="a backend already runs"):
        listen(endpoint, backlog=1)
    listener.close()
    os.close(lock)
    assert endpoint.socket.exists()
    lock, listener = listen(endpoint, backlog=1)
    with listener, connect(endpoint, seconds=1) as sock:
        assert peer(sock) == (os.getpid(), os.getuid())
    os.close(lock)


def test_a_full_backlog_is_waited_for(folder: Path) -> None:
    endpoint = Endpoint(folder=folder)
    lock, listener = listen(endpoint, backlog=0)
    with listener, connect(endpoint, seconds=1):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"no connection within 0\.3 s"):
            connect(endpoint, seconds=0.3)
        assert time.monotonic() - start >= 0.3
        accepting = threading.Timer(0.2, listener.accept)
        accepting.start()
        connect(endpoint, seconds=5).close()
        accepting.join(5)
    os.close(lock)


@pytest.mark.parametrize("other_user", [False, True])
def test_another_user_is_refused(folder: Path, other_user: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    received: list[tuple[socket.socket, frames.Frame]] = []
    events = EventLoop()
    lock, listener = listen(Endpoint(folder=folder), backlog=1)
    uid = os.getuid() + other_user
    connections = Listener(
        listener=listener,
        uid=os.getuid(),
        events=events,
        on_frame=lambda sock, frame: received.append((sock, frame)),
        uid_of=lambda sock: uid,
    )
    with connect(Endpoint(folder=folder), seconds=1) as sock:
        sock.sendall(frames.pack(frames.Frame(message=StatusQuery())))
        events.run_once(1.0)
        events.run_once(0.1)
        if other_user:
            with pytest.raises(ConnectionError):
                frames.recv_header(sock, deadline=deadlines.Deadline(1, "an answer"))
            assert f"refused a connection from user {uid}" in caplog.text
        for accepted, _ in received:
            accepted.close()
    assert [frame.message for _, frame in received] == ([] if other_user else [StatusQuery()])
    connections.close()
    os.close(lock)


def test_a_connection_has_time_to_send_its_header_even_if_too_many_wait(folder: Path) -> None:
    events, received = EventLoop(), list[object]()
    lock, listener = listen(Endpoint(folder=folder), backlog=4)

    def read(sock: socket.socket, frame: frames.Frame) -> None:
        received.append(frame.message)
        sock.close()

    connections = Listener(listener=listener, uid=os.getuid(), events=events, on_frame=read, limit=1, grace=0.3)
    with connect(Endpoint(folder=folder), seconds=1) as first, connect(Endpoint(folder=folder), seconds=1) as second:
        for _ in range(4):
            events.run_once(0.0)
        first.sendall(frames.pack(frames.Frame(message=StatusQuery())))
        events.run_once(1.0)
        assert received == [StatusQuery()]
        time.sleep(0.35)
        connections.tick()
        second.sendall(frames.pack(frames.Frame(message=StatusQuery())))
        events.run_once(1.0)
        events.run_once(1.0)
        assert received == [StatusQuery()] * 2
    connections.close()
    os.close(lock)


def test_a_client_that_sends_its_header_too_slowly_is_disconnected(folder: Path) -> None:
    events = EventLoop()
    lock, listener = listen(Endpoint(folder=folder), backlog=1)
    connections = Listener(
        listener=listener, uid=os.getuid(), events=events, on_frame=lambda sock, frame: sock.close(), patience=0.0
    )
    with connect(Endpoint(folder=folder), seconds=1) as sock:
        sock.sendall(b"PD")
        events.run_once(1.0)
        events.run_once(1.0)
        assert connections.pending
        connections.tick()
        assert not connections.pending
        answer = frames.recv_header(sock, deadline=deadlines.Deadline(1, "an answer")).message
        assert answer == Error(code="deadline", message="the message did not arrive within 0 s")
        assert sock.recv(1) == b""
    connections.close()
    os.close(lock)
