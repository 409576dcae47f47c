"""Find and end the processes that a run of ours started, by the runtime folder in their environment."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from scripts.comfy_paths import ROOT

RUNTIME = "PARALLEL_DIT_RUNTIME"
PR_SET_PDEATHSIG = 1


def using(runtime: Path) -> list[psutil.Process]:
    """Every live process whose ``PARALLEL_DIT_RUNTIME`` is ``runtime``, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(RUNTIME) == str(runtime) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if ours and process.pid != os.getpid():
            found.append(process)
    return found


def describe(processes: list[psutil.Process]) -> str:
    """One line a process: pid and command."""
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines)


def wait_until_none(runtime: Path, deadline: float) -> list[psutil.Process]:
    """Wait up to ``deadline`` seconds for the processes of a runtime folder to end; returns those that did not."""
    end = time.monotonic() + deadline
    while (left := using(runtime)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def stop_backend(runtime: Path, deadline: float = 20.0) -> None:
    """Ask the backend of a runtime folder to end, if one runs."""
    if not runtime.is_dir() or not using(runtime):
        return
    command = [sys.executable, "-m", "parallel_backend", "stop"]
    environment = {**os.environ, RUNTIME: str(runtime)}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=deadline, check=False, stdout=subprocess.DEVNULL)


def kill(processes: list[psutil.Process]) -> None:
    """End processes at once."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def end_with_parent() -> None:
    """For ``preexec_fn``: the child is killed when the thread that started it ends (Linux).

    SIGINT, which ``end_group`` sends, means to it what it means to any program: a shell's background jobs ignore it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(process: "subprocess.Popen[bytes]", deadline: float = 15.0) -> None:
    """Interrupt a process that leads its own group; after ``deadline`` seconds kill the whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(deadline)
