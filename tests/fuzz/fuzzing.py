"""Fuzz targets in processes of their own, for a time, and gather what they find."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .seed_files import FOLDER

ROUND = 60
"""Most seconds of one process, whose memory grows with what it keeps."""
GRACE = 60.0
"""Seconds beyond its time after which a process is killed: for its start, and for an input that hangs."""


@dataclass(kw_only=True)
class Result:
    """What came of one target.

    Attributes:
        executions: how many inputs it has read.
        features: libFuzzer's count of what the inputs reach: edges, comparisons, and how often.
        findings: the report of each finding, the input's file included.
    """

    executions: int = 0
    features: int = 0
    findings: list[str] = field(default_factory=list)


def fuzz(
    target: str,
    *,
    seconds: float,
    kept: Path,
    kinds: Iterable[str] = ("*",),
    seed: int = 0,
    root: Path | None = None,
) -> Result:
    """Fuzz one target, beginning with the inputs in the repository, until something is found.

    Args:
        target: its name.
        seconds: for how long.
        kept: a folder for inputs that reach something new, and for those that find something.
        kinds: which folders of the corpus to begin with.
        seed: of the random changes; 0 for another one each time.
        root: the checkout whose code is fuzzed; None for this one.
    """
    result, end = Result(), time.monotonic() + seconds
    for name in ("new", "findings"):
        (kept / target / name).mkdir(parents=True, exist_ok=True)
    corpus = [folder for kind in kinds for folder in sorted((FOLDER / target).glob(kind)) if folder.is_dir()]
    while (left := round(end - time.monotonic())) >= 1 and not result.findings:
        _run(target, min(ROUND, left), kept / target, corpus, seed, root, result)
    return result


def _run(
    target: str, seconds: int, kept: Path, corpus: list[Path], seed: int, root: Path | None, result: Result
) -> None:
    command = [sys.executable, "-m", "tests.fuzz.child", "--target", target, "--seconds", str(seconds)]
    command += ["--seed", str(seed), "--findings", str(kept / "findings"), str(kept / "new"), *map(str, corpus)]
    log, where = kept / "log", root or FOLDER.parents[2]
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command, stdout=output, stderr=output, timeout=seconds + GRACE, cwd=where, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    text = log.read_text(errors="replace")
    counts = [int(number) for number in re.findall(r"^#(\d+)\t", text, re.MULTILINE)]
    result.executions += max(counts, default=0)
    result.features = max([result.features, *map(int, re.findall(r" ft: (\d+) ", text))])
    if status:
        result.findings.append(_report(text, status))


def _report(text: str, status: int) -> str:
    """Return what a process said about its end: the trace, and the file with the input."""
    lines = [line for line in text.splitlines() if not re.match(r"#\d+\t|INFO: |WARNING: |stat::|MS: |==", line)]
    return "\n".join([f"the process ended with status {status}", *filter(str.strip, lines[-30:])])


def is_available() -> bool:
    """Whether this Python has atheris."""
    return subprocess.run([sys.executable, "-c", "import atheris"], capture_output=True, check=False).returncode == 0


def copy_with_bug(folder: Path, file: str, check: str, bug: str) -> Path:
    """Copy the code that is fuzzed to a folder, with a bug in place of a check, and return the folder.

    Raises:
        ValueError: the file does not hold the check exactly once.
    """
    root = FOLDER.parents[2]
    for part in ("parallel_backend", "tests/fuzz"):
        ignored = shutil.ignore_patterns("__pycache__", "corpus")
        shutil.copytree(root / part, folder / part, ignore=ignored)
    path = folder / "parallel_backend" / file
    code = path.read_text(encoding="utf-8")
    if code.count(check) != 1:
        raise ValueError(f"{file} holds {check!r} {code.count(check)} times, and a bug needs one place")
    path.write_text(code.replace(check, bug), encoding="utf-8")
    return folder
