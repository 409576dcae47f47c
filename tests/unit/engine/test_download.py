"""A model's files arrive whole or not at all, whatever breaks in between, and nothing arrives twice."""

import fcntl
import hashlib
import os
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend import env
from parallel_backend.engine import download as module
from parallel_backend.engine.download import Download, SharedFile
from parallel_backend.errors import BackendUnavailable, InvalidRequest
from parallel_backend.protocol.shared_file import DIGEST, digest_of
from parallel_backend.rank.model_sharing import SocketWay

PIECE = 1000
CONTENT = "abc"


class FirstHost:
    """Shares two files, and breaks each way after as many bytes as ``breaks`` says, or spoils one of them."""

    def __init__(self, folder: Path, breaks: tuple[int, ...] = (), spoilt: int = -1) -> None:
        self.paths = [folder / "model" / "a.json", folder / "model" / "part" / "b.safetensors"]
        for seed, path in enumerate(self.paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(hashlib.shake_128(bytes([seed])).digest(4 * PIECE + 17 * seed))
        self.files = [SharedFile(name=str(path.relative_to(folder)), size=path.stat().st_size) for path in self.paths]
        self.asked: list[tuple[int, int]] = []
        self._breaks, self._spoilt = list(breaks), spoilt

    def open_file(self, number: int, offset: int) -> SocketWay:
        self.asked.append((number, offset))
        ours, theirs = socket.socketpair()
        data = bytearray()
        with self.paths[number].open("rb") as file:
            file.seek(offset)
            while piece := file.read(PIECE):
                data += piece + digest_of(piece)
        if self._spoilt >= 0:
            data[self._spoilt] ^= 1
            self._spoilt = -1
        end = self._breaks.pop(0) if self._breaks else len(data)
        threading.Thread(target=_send, args=(theirs, data[:end]), daemon=True).start()
        return SocketWay(ours)


def _send(sock: socket.socket, data: bytes) -> None:
    with sock:
        sock.sendall(data)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(module, "RETRY", 0.01)
    monkeypatch.setenv(env.MODELS.name, str(tmp_path / "models"))
    monkeypatch.setattr(module, "open_checkpoint", lambda path: SimpleNamespace(content=lambda: CONTENT))


def receive(first: FirstHost, **changes: object) -> Download:
    found = Download(first.files, CONTENT, first.open_file)
    for name, value in changes.items():
        setattr(found, name, value)
    found.start()
    assert found.ended(20.0)
    return found


def arrived(first: FirstHost, tmp_path: Path) -> None:
    for file, path in zip(first.files, first.paths, strict=True):
        assert (tmp_path / "models" / "shared" / CONTENT / file.name).read_bytes() == path.read_bytes()
    left = {path.name for path in (tmp_path / "models" / "shared").iterdir()}
    assert left == {CONTENT, f".{CONTENT}.lock"}


@pytest.mark.parametrize(
    ("breaks", "spoilt", "asked"),
    [
        ((), -1, [(0, 0), (1, 0)]),
        ((0, 1500, PIECE + DIGEST), -1, [(0, 0), (0, 0), (0, 1000), (0, 2000), (1, 0)]),
        ((), 2500, [(0, 0), (0, 2000), (1, 0)]),
    ],
    ids=["whole", "broken ways", "spoilt piece"],
)
def test_a_model_arrives(tmp_path: Path, breaks: tuple[int, ...], spoilt: int, asked: list[tuple[int, int]]) -> None:
    first = FirstHost(tmp_path / "first", breaks, spoilt)
    found = receive(first)
    assert (found.error, found.received, found.total) == ("", 8017, 8017)
    arrived(first, tmp_path)
    assert first.asked == asked


def test_what_has_arrived_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FirstHost(tmp_path / "first", breaks=(9999, 2 * PIECE + 2 * DIGEST + 500, *[0] * 1000))
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    found = receive(first)
    assert found.error.startswith("the first host does not get the model from the first host: ")
    assert found.error.endswith("of 0.0 GB have arrived and are kept)")
    assert not (tmp_path / "models" / "shared" / CONTENT).exists()
    first._breaks, first.asked = [], []
    assert receive(first).error == ""
    assert first.asked == [(1, 2000)]
    arrived(first, tmp_path)


def test_a_way_that_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, ends = FirstHost(tmp_path / "first"), []
    monkeypatch.setattr(module, "PATIENCE", 0.2)

    def silent(number: int, offset: int) -> SocketWay:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return SocketWay(ours)

    found = Download(first.files, CONTENT, silent)
    found.start()
    assert found.ended(20.0)
    assert "no piece of a file arrived within 0.2 s" in found.error


def test_a_cancelled_download_ends_at_once_and_keeps_its_pieces(tmp_path: Path) -> None:
    first, opened = FirstHost(tmp_path / "first"), threading.Event()

    def slow(number: int, offset: int) -> SocketWay:
        ours, theirs = socket.socketpair()
        piece = first.paths[0].read_bytes()[:PIECE]
        theirs.sendall(piece + digest_of(piece))
        slow.end = theirs  # type: ignore[attr-defined]
        opened.set()
        return SocketWay(ours)

    found = Download(first.files, CONTENT, slow)
    found.start()
    assert opened.wait(20.0)
    while found.received < PIECE:
        assert not found.ended(0.01)
    found.stop()
    assert found.ended(5.0)
    assert "was cancelled" in found.error
    assert receive(first).error == ""
    assert first.asked == [(0, 1000), (1, 0)]


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda patch, path: patch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 9)), "GB are free there"),
        (
            lambda patch, path: patch.delenv(env.MODELS.name),
            "there is no folder for it: set PARALLEL_DIT_MODELS there",
        ),
        (lambda patch, path: (path / "models").write_text(""), "Not a directory"),
    ],
    ids=["disk full", "no folder", "not a folder"],
)
def test_what_stands_in_the_way_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[pytest.MonkeyPatch, Path], object],
    words: str,
) -> None:
    first = FirstHost(tmp_path / "first")
    prepare(monkeypatch, tmp_path)
    assert words in receive(first).error
    assert first.asked == []


def test_a_second_process_does_not_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, first = tmp_path / "models" / "shared", FirstHost(tmp_path / "first")
    folder.mkdir(parents=True)
    descriptor = os.open(folder / f".{CONTENT}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(module, "LOCKED", 0.1)
    assert "another process receives it into" in receive(first).error
    monkeypatch.setattr(module, "LOCKED", 20.0)
    waiting = Download(first.files, CONTENT, first.open_file)
    waiting.start()
    assert not waiting.ended(0.3)
    shutil.copytree(tmp_path / "first", folder / CONTENT)  # the other process has received it
    os.close(descriptor)
    assert waiting.ended(20.0)
    assert (waiting.error, first.asked) == ("", [])
    arrived(first, tmp_path)


def test_a_waiting_download_can_be_cancelled(tmp_path: Path) -> None:
    folder, first = tmp_path / "models" / "shared", FirstHost(tmp_path / "first")
    folder.mkdir(parents=True)
    descriptor = os.open(folder / f".{CONTENT}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = Download(first.files, CONTENT, first.open_file)
    waiting.start()
    waiting.stop()
    assert waiting.ended(5.0)
    os.close(descriptor)


def test_a_download_that_opens_no_way_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", 60.0)
    first, tried = FirstHost(tmp_path / "first"), threading.Event()

    def refuses(number: int, offset: int) -> SocketWay:
        tried.set()
        raise BackendUnavailable("not now")

    found = Download(first.files, CONTENT, refuses)
    found.start()
    assert tried.wait(10.0)
    found.stop()
    assert found.ended(5.0)
    assert "was cancelled" in found.error


def test_a_network_that_is_not_there_is_tried_again(tmp_path: Path) -> None:
    first = FirstHost(tmp_path / "first")

    class Broken(socket.socket):
        """What is read when no router finds the first host any more."""

        def recv_into(self, *arguments: object) -> int:
            raise OSError(113, "No route to host")

    ways = [SocketWay(Broken())]
    changed = receive(first, _open_file=lambda *place: ways.pop() if ways else first.open_file(*place))
    assert changed.error == ""
    arrived(first, tmp_path)


def test_files_that_change_meanwhile_are_received_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, contents = FirstHost(tmp_path / "first"), ["another", CONTENT]
    monkeypatch.setattr(module, "open_checkpoint", lambda path: SimpleNamespace(content=lambda: contents.pop(0)))
    assert "its files there have changed meanwhile" in receive(first).error
    assert list((tmp_path / "models" / "shared").iterdir()) == [tmp_path / "models" / "shared" / f".{CONTENT}.lock"]
    assert receive(first).error == ""
    arrived(first, tmp_path)


def test_a_copy_that_was_changed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FirstHost(tmp_path / "first")
    assert receive(first).error == ""
    contents = ["another", CONTENT]
    monkeypatch.setattr(module, "open_checkpoint", lambda path: SimpleNamespace(content=lambda: contents.pop(0)))
    assert receive(first).error == ""
    assert len(first.asked) == 4
    arrived(first, tmp_path)


def test_what_a_model_had_under_other_names_does_not_stay(tmp_path: Path) -> None:
    first = FirstHost(tmp_path / "first")
    old = tmp_path / "models" / "shared" / f"{CONTENT}.part" / "old" / "c.safetensors"
    old.parent.mkdir(parents=True)
    old.write_text("x")
    assert receive(first).error == ""
    assert not list((tmp_path / "models" / "shared").rglob("c.safetensors"))
    arrived(first, tmp_path)


def test_a_name_outside_of_the_folder_is_refused() -> None:
    for name in ("../../x", "/x", "a/../../x"):
        with pytest.raises(InvalidRequest, match=f"'{name}', which is outside of the model's folder"):
            SharedFile(name=name, size=8)


def test_an_error_of_the_gateway_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FirstHost(tmp_path / "first")
    monkeypatch.setattr(module, "PATIENCE", 0.1)

    def refuses(number: int, offset: int) -> SocketWay:
        raise BackendUnavailable("generation 3 of the ranks shares no file 0 now")

    assert "shares no file 0 now" in receive(first, _open_file=refuses).error
