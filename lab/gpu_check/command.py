"""Runs the parts one after another.

Each part writes its findings to a file. Findings of the same commit are not repeated. A check whose time ran out goes
on with the rest.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.gpu_check import page, running
from lab.gpu_check.packages import ROOT
from lab.gpu_check.parts import LIMIT, PARTS, Part

PAGE = "page.md"


def run(number: int | None, out: Path) -> int:
    """Run all parts, or the one with this number, and return the exit status: 1 if a check failed."""
    statuses = _run_parts(number, out)
    if "timed out" in statuses:
        print("run the command again: what timed out goes on with the rest")
    return int("failed" in statuses or "timed out" in statuses)


def _run_parts(number: int | None, out: Path) -> list[running.Status]:
    """Run all parts, or the one with this number, write the page, and return the status of every check."""
    out.mkdir(parents=True, exist_ok=True)
    machine, commit, cards = _machine(), _commit(), _cards()
    print(f"{machine}; commit {commit}", flush=True)
    for part in PARTS:
        if number in (None, part.number):
            _run_part(part, out, commit=commit, cards=cards, again=number is not None)
    parts = [_content(part, out, commit) for part in PARTS]
    (out / PAGE).write_text(page.page(parts, machine=machine, commit=commit), encoding="utf-8")
    print(f"the page is {out / PAGE}")
    return [outcome["status"] for part in parts for outcome in part["outcomes"]]


def _run_part(part: Part, out: Path, *, commit: str, cards: int, again: bool) -> None:
    """Run a part's unfinished checks, print their outcomes and write the part's file."""
    file = _file(out, part)
    outcomes = _finished(_read(file, commit))
    if len(outcomes) == len(part.checks):
        if not again:
            print(f"part {part.number} has run: {file}", flush=True)
            return
        outcomes = {}
    print(f"part {part.number}: {part.title}", flush=True)
    end = time.monotonic() + LIMIT
    for number, check in enumerate(part.checks):
        if check.title in outcomes:
            continue
        kept = out / f"part-{part.number}.{number}.{commit}.kept"
        outcome = running.run(check, cards=cards, seconds=end - time.monotonic(), kept=kept.absolute())
        _print(outcome)
        outcomes[check.title] = asdict(outcome)
        in_order = [outcomes[each.title] for each in part.checks if each.title in outcomes]
        content = {"number": part.number, "title": part.title, "commit": commit, "outcomes": in_order}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _content(part: Part, out: Path, commit: str) -> dict[str, Any]:
    """Return a part's findings, with an outcome for every check, also for checks that have not run."""
    found = _read(_file(out, part), commit)
    outcomes = {outcome["title"]: outcome for outcome in (found["outcomes"] if found else [])}
    rest = {check.title: asdict(running.not_run(check)) for check in part.checks}
    ordered = [outcomes.get(title, missing) for title, missing in rest.items()]
    return {"number": part.number, "title": part.title, "outcomes": ordered}


def _finished(content: dict[str, Any] | None) -> dict[str, Any]:
    """Return the outcomes of the checks of a part that need not run again, by title."""
    outcomes = content["outcomes"] if content else []
    return {outcome["title"]: outcome for outcome in outcomes if outcome["status"] != "timed out"}


def _print(outcome: running.Outcome) -> None:
    left_out = f"; left out: {outcome.left_out}" if outcome.left_out else ""
    print(f"  {outcome.status:9} {outcome.seconds:4.0f} s  {outcome.title}{left_out}", flush=True)
    if outcome.status in ("failed", "timed out"):
        print(outcome.output, flush=True)


def _file(out: Path, part: Part) -> Path:
    return out / f"part-{part.number}.json"


def _read(file: Path, commit: str) -> dict[str, Any] | None:
    """Return a part's findings; None if it has not run at this commit."""
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content if content["commit"] == commit else None


def _commit() -> str:
    """Return the commit, with a mark if files have changed since; ``unknown`` outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip() or "unknown"


def _cards() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _machine() -> str:
    import torch

    cards = [torch.cuda.get_device_name(index) for index in range(_cards())]
    named = ", ".join(f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards)) or "no GPU"
    return f"{named}, torch {torch.__version__}, Python {sys.version.split()[0]}"
