"""Starting a backend that outlives the process that starts it."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .. import processes
from ..errors import BackendUnavailable, Cancelled
from ..protocol.deadlines import Deadline
from ..protocol.endpoint import Endpoint, connect

ROOT = Path(__file__).resolve().parents[2]
"""The folder that ``parallel_backend`` lies in; on the module path of the backend's processes only."""

ALREADY_RUNS = 75
"""Exit status of a supervisor that found another one at its endpoint."""

POLL = 0.05
"""Seconds between two looks at a starting backend."""

START_PATIENCE = 60.0
"""Seconds in which a started backend answers."""


class Launch:
    """A supervisor being started by this process."""

    def __init__(self, endpoint: Endpoint, *, idle_timeout: float | None = None) -> None:
        endpoint.prepare()
        self._endpoint = endpoint
        python = os.environ.get("PARALLEL_DIT_PYTHON") or sys.executable
        command = [python, "-m", "parallel_backend", "serve"]
        command += [] if idle_timeout is None else ["--idle-timeout", f"{idle_timeout:g}"]
        try:
            with endpoint.log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=endpoint.folder,
                    env=_environment(endpoint),
                    start_new_session=True,
                )
        except OSError as error:
            raise BackendUnavailable(f"{python} does not start: {error.strerror}") from error
        # Reaps the supervisor when it ends, maybe hours later, so that it never shows as a zombie.
        threading.Thread(target=self._process.wait, name="backend-reaper", daemon=True).start()

    def gave_way(self) -> bool:
        """Whether it found another one at its endpoint and ended, rather than that it may still come up.

        Raises:
            BackendUnavailable: it ended for another reason; quotes the last line of its log.
        """
        status = self._process.poll()
        if status in (None, ALREADY_RUNS):
            return status is not None
        said = processes.last_line(self._endpoint.log)
        how = processes.describe_exit(status or 0)
        raise BackendUnavailable(f"the starting backend {how}: {said or 'it said nothing'} (log: {self._endpoint.log})")


def connect_or_start(
    endpoint: Endpoint,
    *,
    connect_seconds: float,
    start_seconds: float,
    idle_timeout: float | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """A connection to the backend, which is started if none runs.

    Raises:
        BackendUnavailable: it does not come up; quotes its log.
        DeadlineExceeded: it takes too long.
        Cancelled: ``interrupted`` said so.
    """
    with contextlib.suppress(BackendUnavailable):
        return connect(endpoint, seconds=connect_seconds)
    deadline = Deadline(start_seconds, f"starting the backend (log: {endpoint.log})")
    launch = None
    while True:
        # The one that it gave way to may have been ending, and hold the lock until its ranks are gone.
        if launch is None or launch.gave_way():
            launch = Launch(endpoint, idle_timeout=idle_timeout)
        with contextlib.suppress(BackendUnavailable):
            return connect(endpoint, seconds=min(deadline.remaining(), connect_seconds))
        if interrupted():
            raise Cancelled("the request was cancelled while the backend started")
        time.sleep(min(deadline.remaining(), POLL))


def _environment(endpoint: Endpoint) -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PARALLEL_DIT_RUNTIME": str(endpoint.folder)}
