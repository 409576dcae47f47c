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
from parallel_backend.protocol.endpoint import Endpoint, connect, listen, peer
from parallel_backend.protocol.messages import Error
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
