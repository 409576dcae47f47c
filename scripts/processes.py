"""Helpers of scripts and tests: wait for a condition, and find, stop and kill the processes of a runtime folder.

The processes of a runtime folder are those whose environment names it (``PARALLEL_DIT_RUNTIME``).
``parallel_backend.processes`` has what the backend itself needs.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from parallel_backend import env
from parallel_backend.client import query
from parallel_backend.errors import BackendError, DeadlineExceeded
from parallel_backend.processes import die_with_parent
from parallel_backend.protocol.deadlines import Deadline
from parallel_backend.protocol.endpoint import Endpoint

RUNTIME = env.RUNTIME.name
SETTINGS = env.SETTINGS.name
POLL = 0.05
"""Seconds between two checks of a condition."""

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value | None], seconds: float, what: str) -> Value:
    """Call ``condition`` until it returns something true, and return that.

    Raises:
        DeadlineExceeded: it did not within ``seconds``; the message contains ``what``.
    """
    deadline = Deadline(seconds, f"waiting until {what}")
    while not (value := condition()):
        time.sleep(min(POLL, deadline.remaining()))
    return value


def find(variable: str, accepts: Callable[[str], bool]) -> list[psutil.Process]:
    """Every live process except this one whose environment ``variable`` is set to a value that ``accepts`` takes."""
    found = []
    for process in psutil.process_iter():
        try:
            value = process.environ().get(variable)
            matches = value is not None and accepts(value) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if matches and process.pid != os.getpid():
            found.append(process)
    return found


def processes_of(runtime: Path) -> list[psutil.Process]:
    """Every live process of a runtime folder except this one."""
    return find(RUNTIME, lambda value: value == str(runtime))


def describe(processes: list[psutil.Process]) -> str:
    """One line for each process: pid and command."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
    return "\n".join(lines)


def wait_for_exit(runtime: Path, deadline: float) -> list[psutil.Process]:
    """Wait up to ``deadline`` seconds for the processes of a runtime folder to exit; return those that did not."""
    with contextlib.suppress(DeadlineExceeded):
        wait_until(lambda: not processes_of(runtime), deadline, f"the processes of {runtime} have exited")
    return processes_of(runtime)


def stop_backend(runtime: Path, deadline: float = 20.0) -> None:
    """Ask the backend of a runtime folder to stop, if one runs, and wait up to ``deadline`` seconds until it has."""
    if processes_of(runtime):
        with contextlib.suppress(BackendError):
            query.stop(Endpoint(folder=runtime), seconds=deadline)


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def end_with_parent() -> None:
    """For ``preexec_fn``: have the kernel kill the child when the thread that started it ends.

    The child also gets the default handler of SIGINT, which ``end_group`` sends: a shell's background jobs ignore it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


def end_group(process: "subprocess.Popen[bytes]", deadline: float = 15.0) -> None:
    """Interrupt a process that leads its own group; after ``deadline`` seconds kill the whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(deadline)
