"""Receives a model's files from the first host, beside what this thread does, and goes on where it was broken off."""

import contextlib
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..errors import BackendError, Cancelled, DeadlineExceeded, InvalidRequest
from ..protocol.shared_file import DIGEST, PIECE, digest_of
from .model_folders import FOLDERS, PART, folders, this_host

PATIENCE = 60.0
"""Seconds in which at least one piece of a file has to arrive, however often it has to be asked for."""
LOCKED = 25.0
"""Seconds in which another process, or a request that was cancelled, has to leave the files alone."""
RETRY = 1.0
"""Seconds between two attempts to open a way to the first host."""


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """A file of a model: its path relative to the folder in which the model is, and its bytes."""

    name: str
    size: int


Open = Callable[[int, int], socket.socket]
"""Opens a way to the file of a number, from an offset on. Raises ``BackendError`` or ``OSError``."""


class Download:
    """Receives one model into ``shared`` in the first of this host's model folders.

    Args:
        files: of the model, in the first host's order.
        content: the model's content.
        open_file: opens a way to a file of the first host.

    Attributes:
        received: bytes that this host has, of ``total``.
        error: why it has ended without the whole model; "" for no such reason.
    """

    def __init__(self, files: Sequence[SharedFile], content: str, open_file: Open) -> None:
        self._files, self._content, self._open_file = files, content, open_file
        self.total, self.received, self.error = sum(file.size for file in files), 0, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="download", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and keep what has arrived."""
        self._stopped.set()

    def ended(self, seconds: float) -> bool:
        """Wait for the end for so many seconds at most; return whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._receive_all()
        except (BackendError, OSError) as error:
            done = f"{self.received / 1e9:.1f} of {self.total / 1e9:.1f} GB have arrived"
            self.error = f"{this_host()} does not get the model from the first host: {error} ({done} and are kept)"

    def _receive_all(self) -> None:
        folder = _folder()
        unfinished, finished = folder / f"{self._content}{PART}", folder / self._content
        unfinished.mkdir(parents=True, exist_ok=True)
        with self._locked(unfinished):
            self._check_space(unfinished)
            for number, file in enumerate(self._files):
                with _opened(unfinished / _safe(file.name), file.size) as (out, kept):
                    self.received += kept
                    self._receive(number, file.size - kept, out)
            if finished.exists():  # it was changed after it had arrived
                shutil.rmtree(finished)
            unfinished.rename(finished)

    @contextlib.contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        descriptor, overdue = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), time.monotonic() + LOCKED
        try:
            while not _lock(descriptor):
                if time.monotonic() > overdue or self._stopped.is_set():
                    raise InvalidRequest(f"another process receives it into {folder}: try again later")
                time.sleep(RETRY / 10)
            yield
        finally:
            os.close(descriptor)

    def _check_space(self, folder: Path) -> None:
        present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        free, needed = shutil.disk_usage(folder).free, self.total - present
        if needed > free:
            raise InvalidRequest(f"{folder} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")

    def _receive(self, number: int, left: int, out: BinaryIO) -> None:
        """Append what is left of a file, opening a way to it as often as one breaks."""
        overdue = time.monotonic() + PATIENCE
        while left:
            try:
                with self._open_file(number, out.tell()) as way:
                    while left:
                        piece = self._piece(way, min(PIECE, left))
                        out.write(piece)
                        out.flush()
                        os.fdatasync(out.fileno())  # what has this length later is on the disk
                        left -= len(piece)
                        self.received += len(piece)
                        overdue = time.monotonic() + PATIENCE
            except (BackendError, ConnectionError, TimeoutError) as error:
                if isinstance(error, Cancelled) or time.monotonic() > overdue:
                    raise
                time.sleep(RETRY)

    def _piece(self, way: socket.socket, size: int) -> bytearray:
        piece, digest = self._read(way, size), self._read(way, DIGEST)
        if digest_of(piece) != digest:
            raise ConnectionError("a piece of a file arrived with errors")
        return piece

    def _read(self, way: socket.socket, size: int) -> bytearray:
        found, overdue = bytearray(size), time.monotonic() + PATIENCE
        room = memoryview(found)
        way.settimeout(RETRY)
        while room:
            if self._stopped.is_set():
                raise Cancelled("the request was cancelled")
            with contextlib.suppress(TimeoutError):
                count = way.recv_into(room)
                if not count:
                    raise ConnectionResetError("the first host closed the connection")
                room = room[count:]
            if time.monotonic() > overdue:
                raise DeadlineExceeded(f"no piece of a file arrived within {PATIENCE:g} s")
        return found


def _folder() -> Path:
    where = folders()
    if not where:
        raise InvalidRequest(f"there is no folder for it: set {FOLDERS} there")
    return where[0] / "shared"


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidRequest(f"a file is called {name!r}, which is outside of the model's folder")
    return path


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path, size: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file to append to it; yield it and how many of its bytes count: whole pieces, or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as out:
        present = out.tell()
        kept = present if present == size else min(present, size) // PIECE * PIECE
        out.truncate(kept)
        out.seek(kept)
        yield out, kept
