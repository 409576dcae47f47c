"""The output of one rank's process to stdout and stderr, also from native libraries."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from ...protocol.endpoint import rank_log
from ..event_loop import READ, EventLoop
from ..log_files import MAX_LINE, LogFiles

_CHUNK = 64 << 10
_ROOM = 1 << 20
"""Bytes that the pipe holds while the supervisor does not read, and that are read at most when the process ends."""
_TAIL = 256 << 10
"""Bytes that are kept for the error of a process that ends."""


class RankOutput:
    """A pipe from a rank's process to its log. It also keeps the end of the output.

    Not a file, because its size has no limit, a full disk would fail the rank's own writes, and the next process of
    this rank would write to it, too.

    Args:
        rank: the rank's number.
        title: a line that the log begins with for this process.
        logs: take the lines.
        events: the supervisor's event loop.
    """

    def __init__(self, rank: int, title: str, logs: LogFiles, events: EventLoop) -> None:
        self._logs, self._events, self._name = logs, events, rank_log(rank)
        self._tail, self._unfinished, self._open = bytearray(), b"", True
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        with contextlib.suppress(OSError):  # the user's limit is reached: it stays smaller
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _ROOM)
        logs.write(self._name, f"--- {title} ---")
        events.watch(self._read_end, READ, self.read, discard=lambda error: self._close())

    @contextlib.contextmanager
    def writable(self) -> Iterator[int]:
        """The rank's end of the pipe, while the context lasts. A process that starts meanwhile inherits a copy."""
        try:
            yield self._write_end
        finally:
            os.close(self._write_end)

    @property
    def tail(self) -> str:
        """The end of the process's output."""
        return self._tail.decode(errors="replace")

    def read(self) -> int:
        """Take what has arrived, up to a limit; return the number of bytes."""
        try:
            chunk = os.read(self._read_end, _CHUNK) if self._open else b""
        except BlockingIOError:
            return 0
        if self._open and not chunk:
            self._close()
        self._tail += chunk
        del self._tail[:-_TAIL]
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        if len(self._unfinished) > MAX_LINE:
            lines, self._unfinished = [*lines, self._unfinished], b""
        for line in lines:
            self._logs.write(self._name, line.decode(errors="replace"))
        return len(chunk)

    def finish(self) -> None:
        """Read the rest of an ended process's output. A process that it started may still hold the pipe."""
        taken = 0
        while taken < 2 * _ROOM and (count := self.read()):
            taken += count
        if self._unfinished:
            self._logs.write(self._name, self._unfinished.decode(errors="replace"))
            self._unfinished = b""
        if self._open:
            self._close()

    def _close(self) -> None:
        self._open = False
        self._events.forget(self._read_end)
        os.close(self._read_end)
