"""Receives a model's files from the first host, beside what this thread does, and goes on where it was broken off."""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from .. import env
from ..checkpoint.opening import open_checkpoint
from ..errors import BackendError, Cancelled, DeadlineExceeded, InvalidRequest
from ..protocol.shared_file import DIGEST, PIECE, digest_of
from .model_folders import PART, shared_folder, this_host

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds in which at least one piece of a file has to arrive, however often it has to be asked for."""
LOCKED = 90.0
"""Seconds in which another process has to receive some of the same files, or to leave them alone."""
RETRY = 1.0
"""Seconds between two attempts to open a way to the first host."""


@dataclass(frozen=True, kw_only=True)
class SharedFile:
    """A file of a model: its path relative to the folder in which the model is, and its bytes."""

    name: str
    size: int

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts:
            raise InvalidRequest(f"a file is called {self.name!r}, which is outside of the model's folder")

    def bytes_in(self, folder: Path) -> int:
        """How many of its bytes a folder has."""
        path = folder / self.name
        return min(self.size, path.stat().st_size) if path.is_file() else 0


class Way(Protocol):
    """A file's bytes and digests as they come."""

    def read_into(self, room: memoryview) -> int | None:
        """Return how many bytes were read, 0 at the end, None if none has come within about a second.

        Raises:
            ConnectionError: it is broken.
        """

    def __enter__(self) -> "Way": ...

    def __exit__(self, *error: object) -> None: ...


Open = Callable[[int, int], Way]
"""Opens a way to the file of a number, from an offset on. Raises ``BackendError`` or ``ConnectionError``."""


class Download:
    """Receives one model into a folder that has the name of its content, see ``shared_folder``.

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
        folder = shared_folder()
        if folder is None:
            raise InvalidRequest(f"there is no folder for it: set {env.MODELS} there")
        unfinished, finished = folder / f"{self._content}{PART}", folder / self._content
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked(folder / f".{self._content}.lock", unfinished):
            if self._is_complete(finished):  # another process has received it meanwhile
                self.received = self.total
                return
            unfinished.mkdir(exist_ok=True)
            self._check_space(unfinished)
            for number, file in enumerate(self._files):
                with _opened(unfinished / file.name, file.size) as (out, kept):
                    self.received += kept
                    self._receive(number, file.size - kept, out)
            self._remove_others(unfinished)
            if not self._is_complete(unfinished):
                shutil.rmtree(unfinished)
                raise InvalidRequest("its files there have changed meanwhile")
            if finished.exists():
                shutil.rmtree(finished)
            unfinished.rename(finished)

    def _is_complete(self, folder: Path) -> bool:
        if any(file.bytes_in(folder) != file.size for file in self._files):
            return False
        try:
            return open_checkpoint(folder / PurePosixPath(self._files[0].name).parts[0]).content() == self._content
        except InvalidRequest:
            return False

    def _remove_others(self, folder: Path) -> None:
        """Remove files that are there under names which the model had before."""
        wanted = {folder / file.name for file in self._files}
        for path in [path for path in folder.rglob("*") if path.is_file() and path not in wanted]:
            path.unlink()

    @contextlib.contextmanager
    def _locked(self, path: Path, unfinished: Path) -> Iterator[None]:
        overdue, present = time.monotonic() + LOCKED, 0
        with path.open("ab") as file:
            while not _lock(file):
                if present != (present := sum(each.bytes_in(unfinished) for each in self._files)):
                    self.received, overdue = present, time.monotonic() + LOCKED
                if time.monotonic() > overdue:
                    raise InvalidRequest(f"another process receives it into {path.parent}: try again later")
                self._pause(RETRY / 10)
            self.received = 0
            yield

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Cancelled("the request was cancelled")

    def _check_space(self, folder: Path) -> None:
        needed = self.total - sum(file.bytes_in(folder) for file in self._files)
        free = shutil.disk_usage(folder).free
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
                        _append(out, piece)
                        left -= len(piece)
                        self.received += len(piece)
                        overdue = time.monotonic() + PATIENCE
            except (BackendError, ConnectionError) as error:
                if isinstance(error, Cancelled | InvalidRequest) or time.monotonic() > overdue:
                    raise
                log.warning("a file of the first host is asked for again: %s", error)
                self._pause(RETRY)

    def _piece(self, way: Way, size: int) -> bytearray:
        piece, digest = self._read(way, size), self._read(way, DIGEST)
        if digest_of(piece) != digest:
            raise ConnectionError("a piece of a file arrived with errors")
        return piece

    def _read(self, way: Way, size: int) -> bytearray:
        found, overdue = bytearray(size), time.monotonic() + PATIENCE
        room = memoryview(found)
        while room:
            self._pause(0.0)
            count = way.read_into(room)
            if count == 0:
                raise ConnectionResetError("the first host closed the connection")
            room = room[count or 0 :]
            if time.monotonic() > overdue:
                raise DeadlineExceeded(f"no piece of a file arrived within {PATIENCE:g} s")
        return found


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _append(out: BinaryIO, piece: bytearray) -> None:
    out.write(piece)
    out.flush()
    os.fdatasync(out.fileno())  # what a file's length says later is on the disk


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
