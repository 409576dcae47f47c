"""Writes the backend's logs in a thread of its own: no full, slow or missing disk ends or stalls the supervisor.

Each log is a file of at most ``MAX_BYTES``, with older files beside it; ``.1`` is the newest of these.
"""

import contextlib
import logging
import logging.handlers
import queue
import sys
import threading
from io import TextIOWrapper
from pathlib import Path

from ..protocol.endpoint import BACKEND_LOG
from ..protocol.private_file import FOLDER_MODE, opener

MAX_BYTES, KEPT = 1 << 20, 3
"""Bytes of a log, and how many older files of it are kept."""
MAX_LINE = 8 << 10
"""Characters of a line; longer ones are cut into several."""
_QUEUED = 2000
"""Lines that may wait for the disk; more are lost and counted."""
_END = 2.0
"""Seconds that the thread has to write what is queued when the supervisor ends."""


class LogFiles:
    """The logs in one folder. Only ``close`` waits, and no method raises errors of the disk.

    Args:
        folder: made at the first write.
        max_bytes: of one file.
        kept: number of older files of each log.
        queued: most lines that may wait for the disk.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT, queued: int = _QUEUED) -> None:
        self.folder, self._max_bytes, self._kept = folder, max_bytes, kept
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(queued)
        self._files: dict[str, _RotatingFile] = {}
        self._lost_in_queue, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, file: str, line: str) -> None:
        """Append a line to a log, named by its file in the folder."""
        try:
            self._queue.put_nowait((file, line))
        except queue.Full:
            self._lost_in_queue += 1

    def handler(self) -> logging.Handler:
        """Return a handler for this process's own log."""
        handler = _ToLogFiles(self)
        handler.setFormatter(logging.Formatter("%(asctime)s supervisor: %(message)s"))
        return handler

    @property
    def problem(self) -> str:
        """Why lines are, or were, not written to the disk; "" if all were written."""
        files = list(self._files.values())
        lost = self._lost_in_queue + sum(file.lost for file in files)
        if not lost:
            return ""
        reason = next((file.reason for file in files if file.reason), "the disk is too slow")
        return f"{lost} line{'s are' if lost > 1 else ' is'} missing: {reason}"

    def close(self) -> None:
        """Write the queued lines, as far as the disk takes them in a short time."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_END)
            self._thread.join(_END)

    def _run(self) -> None:
        while queued := self._queue.get():
            name, line = queued
            if name not in self._files:
                self._files[name] = _RotatingFile(self.folder / name, self._max_bytes, self._kept)
            for start in range(0, max(1, len(line)), MAX_LINE):
                self._files[name].emit(logging.makeLogRecord({"msg": line[start : start + MAX_LINE]}))
        for file in self._files.values():
            file.close()


class _RotatingFile(logging.handlers.RotatingFileHandler):
    """One log. ``lost`` counts the lines that could not be written; ``reason`` says why."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="replace", delay=True)
        self._path, self.lost, self.reason = path, 0, ""

    def _open(self) -> TextIOWrapper:
        self._path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        return open(self._path, "a", encoding="utf-8", errors="replace", opener=opener)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Make the file again if something removed it, such as a cleaner of /tmp."""
        if self.stream is not None and not self._path.exists():
            self._drop_stream()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that could not be written, and open the file anew for the next one."""
        error = sys.exc_info()[1]
        self.lost, self.reason = self.lost + 1, getattr(error, "strerror", None) or str(error)
        self._drop_stream()

    def _drop_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):  # closing tries once more to write what a full disk did not take
                stream.close()


class _ToLogFiles(logging.Handler):
    def __init__(self, files: LogFiles) -> None:
        super().__init__()
        self._files = files

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self._files.write(BACKEND_LOG, line)
