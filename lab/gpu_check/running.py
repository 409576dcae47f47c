"""Run a check's command within a deadline, and leave no process of it behind."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lab.gpu_check.kept import FILE
from lab.gpu_check.packages import ROOT
from lab.gpu_check.parts import Check
from scripts import processes

_TAIL = 4000
"""Characters of a command's output that are kept."""
_THREADS = 4
"""CPU threads of a command at most."""

Status = Literal["passed", "failed", "left out", "timed out", "not run"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended.

    Attributes:
        title: the check's.
        status: ``left out`` if nothing of it runs on so few GPUs, ``timed out`` if the part's time was over before or
            while it ran.
        seconds: how long it ran.
        output: the end of its output.
        left_out: its parts that did not run, and why; empty if all ran.
        figures: from its last line.
    """

    title: str
    status: Status
    seconds: float = 0.0
    output: str = ""
    left_out: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def not_run(check: Check) -> Outcome:
    """Return the outcome of a check that has not run yet."""
    return Outcome(title=check.title, status="not run", left_out="it has not run at this commit")


def run(check: Check, *, cards: int, seconds: float, kept: Path) -> Outcome:
    """Run a check.

    Args:
        check: what to run.
        cards: number of GPUs here.
        seconds: remaining time of the part.
        kept: file for the check's findings so far, in case the time runs out.
    """
    few = f"it needs {check.cards} GPU{'s' * (check.cards > 1)}, and there are {cards}" if cards < check.cards else ""
    if few and not check.rest:
        return Outcome(title=check.title, status="left out", left_out=few)
    if seconds <= 0:
        return Outcome(title=check.title, status="timed out", output="the part's time was over before it began")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        code, text = _run(check, Path(folder), seconds, kept)
    if code is not None:
        kept.unlink(missing_ok=True)
    return Outcome(
        title=check.title,
        status="timed out" if code is None else "failed" if code else "passed",
        seconds=time.monotonic() - started,
        output=text[-_TAIL:],
        left_out=f"all but {check.rest}, since {few}" if few else "",
        figures=_figures(text),
    )


def _run(check: Check, folder: Path, seconds: float, kept: Path) -> tuple[int | None, str]:
    """Return the exit status, None if the time was over, and the output."""
    runtime, log = folder / "run", folder / "log"
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    fixed = {processes.RUNTIME: str(runtime), FILE: str(kept), "OMP_NUM_THREADS": str(threads)}
    environment = os.environ | fixed | dict(check.environment)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *check.command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        code = process.poll()
        processes.end_group(process)
        processes.kill(processes.processes_of(runtime))
    return code, log.read_text(errors="replace")


def _figures(text: str) -> dict[str, Any]:
    """Return the JSON object in the last line, if there is one."""
    last = text.rstrip().rpartition("\n")[2]
    if not last.startswith("{"):
        return {}
    try:
        figures: dict[str, Any] = json.loads(last)
    except ValueError:
        return {}
    return figures
