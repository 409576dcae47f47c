"""Start a backend that outlives the process that starts it."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from .. import env, last_words, packages, processes
from ..errors import BackendUnavailable, Cancelled
from ..inherited import inherited
from ..protocol.deadlines import Deadline
from ..protocol.endpoint import Endpoint, connect, passed_over
from ..protocol.private_file import append_to

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains ``parallel_backend``; only the backend's processes have it on their module path."""

ALREADY_RUNS = 75
"""Exit status of a supervisor that finds another one at its endpoint."""

POLL = 0.05
"""Seconds between two checks of a starting backend."""

MAX_START_LOG = 256 << 10
"""Bytes of the log of starts above which the next start begins a new one."""

START_TIMEOUT = 60.0
"""Seconds that a started backend has to answer."""


class Launch:
    """A supervisor that this process has started."""

    def __init__(self, endpoint: Endpoint, *, idle_timeout: float | None = None, options: Sequence[str] = ()) -> None:
        endpoint.prepare()
        if note := passed_over(endpoint):
            log.warning("%s", note)
        self._python = python = env.PYTHON.get() or sys.executable
        command = [python, "-m", "parallel_backend", "serve", "--quiet", *options]
        command += [] if idle_timeout is None else ["--idle-timeout", repr(idle_timeout)]
        try:
            self._output, self._log = _start_log(endpoint)
            weakref.finalize(self, self._output.close)
            self._start = self._output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                cwd=endpoint.folder,
                env=environment(endpoint),
                start_new_session=True,
            )
        except OSError as error:
            raise BackendUnavailable(f"{python} does not start: {error.strerror}") from error
        # Reaps the supervisor when it exits, maybe hours later, so that it never shows as a zombie.
        threading.Thread(target=self._process.wait, name="backend-reaper", daemon=True).start()

    def gave_way(self) -> bool:
        """Whether the supervisor exited because another one serves its endpoint. False while it may still start.

        Raises:
            BackendUnavailable: it exited for another reason; the message quotes the last line of its log.
        """
        status = self._process.poll()
        if status in (None, ALREADY_RUNS):
            return status is not None
        output = last_words.tail(Path(f"/proc/self/fd/{self._output.fileno()}"), after=self._start)
        how, why = processes.describe_exit(status or 0), last_words.of(status or 0, output) or "it wrote nothing"
        missing = any(name in why for name in ("ModuleNotFoundError", "ImportError"))
        remedy = f": run {self._python} -m pip install -r {packages.REQUIREMENTS}" if missing else ""
        raise BackendUnavailable(f"the starting backend {how}: {why}{remedy}{self._log}")


def _start_log(endpoint: Endpoint) -> tuple[IO[bytes], str]:
    """Open the file for a supervisor's output, or memory if the disk refuses the file.

    Returns:
        The open file, and its place as the end of an error's sentence; "" for memory.
    """
    path = endpoint.start_log
    try:
        if path.exists() and path.stat().st_size > MAX_START_LOG:
            path.replace(path.with_name(f"{path.name}.1"))
        return append_to(path), f" (log: {path})"
    except OSError:  # ``LogFiles`` meets the same error, and ``status`` shows it
        return os.fdopen(os.memfd_create("start-log"), "ab"), ""


def connect_or_start(
    endpoint: Endpoint,
    *,
    connect_seconds: float,
    start_seconds: float,
    idle_timeout: float | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    options: Sequence[str] = (),
) -> socket.socket:
    """Connect to the backend, and start it if none runs. A backend on another machine is never started.

    Raises:
        BackendUnavailable: it does not start; the message quotes its log. Or it spans several machines, or is on
            another one, and does not answer.
        DeadlineExceeded: it takes too long.
        Cancelled: ``interrupted`` returned true.
    """
    if endpoint.remote is not None:
        return connect(endpoint, seconds=connect_seconds)
    with contextlib.suppress(BackendUnavailable):
        return connect(endpoint, seconds=connect_seconds)
    if endpoint.by_hand.exists() and not options:
        raise BackendUnavailable(
            "the backend for several machines has ended, and ComfyUI cannot start such a one: run python -m "
            "parallel_backend serve again as before, or python -m parallel_backend stop to do without other machines"
        )
    deadline = Deadline(start_seconds, f"starting the backend (log: {endpoint.log})")
    launch = None
    while True:
        # Another supervisor serves the endpoint. It may be shutting down, and holds the lock until its ranks are gone.
        if launch is None or launch.gave_way():
            launch = Launch(endpoint, idle_timeout=idle_timeout, options=options)
        with contextlib.suppress(BackendUnavailable):
            return connect(endpoint, seconds=min(deadline.remaining(), connect_seconds))
        if interrupted():
            raise Cancelled("the request was cancelled while the backend started")
        time.sleep(min(deadline.remaining(), POLL))


def environment(endpoint: Endpoint) -> dict[str, str]:
    """The environment of a backend's processes: this process's, with the module path and the folders."""
    folders = {env.RUNTIME.name: str(endpoint.folder), env.LOGS.name: str(endpoint.logs)}
    kept = {name: value for name, value in with_backend().items() if name != env.BACKEND.name}  # this backend is here
    return kept | folders


def with_backend() -> dict[str, str]:
    """This process's environment, with ``parallel_backend`` on the module path."""
    kept = inherited(os.environ)
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}
