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

from scripts import processes
from scripts.gpu_check.packages import ROOT
from scripts.gpu_check.parts import Check

_TAIL = 4000
"""Characters of a command's output that are kept."""

Status = Literal["passed", "failed", "left out", "timed out"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended.

    Attributes:
        title: the check's.
        status: ``left out`` if it needs more GPUs than there are, or the part's time was over.
        seconds: how long it ran.
        output: the end of its output, or why it was left out.
        figures: what its last line says.
    """

    title: str
    status: Status
    seconds: float = 0.0
    output: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def run(check: Check, *, cards: int, seconds: float) -> Outcome:
    """Run a check.

    Args:
        check: what to run.
        cards: number of GPUs here.
        seconds: what is left of the part's time.
    """
    if cards < check.cards:
        return Outcome(title=check.title, status="left out", output=f"needs {check.cards} GPUs, and there are {cards}")
    if seconds <= 0:
        return Outcome(title=check.title, status="left out", output="the part's time is over")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        code, text = _run(check, Path(folder), seconds)
    status: Status = "timed out" if code is None else "failed" if code else "passed"
    return Outcome(
        title=check.title, status=status, seconds=time.monotonic() - started, output=text[-_TAIL:],
        figures=_figures(text),
    )  # fmt: skip


def _run(check: Check, folder: Path, seconds: float) -> tuple[int | None, str]:
    """Return the exit status, None if the time was over, and the output."""
    runtime, log = folder / "run", folder / "log"
    environment = os.environ | {processes.RUNTIME: str(runtime), "OMP_NUM_THREADS": "4"} | dict(check.environment)
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
