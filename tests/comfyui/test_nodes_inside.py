"""Runs ``tests/inside_comfyui`` inside a process of each ComfyUI version."""

import os
import re
from pathlib import Path

import pytest

from scripts import comfy_paths
from tests.support.inside import FOLDER, run_inside

DEADLINE = 3000.0
"""Seconds: several times what the newest takes alone, since both run beside everything else."""
GRID_DEADLINE = 7200.0
CASES = 2
"""Of each test with every ComfyUI but the newest one, which runs more. Those that need all are marked."""


@pytest.mark.timeout(DEADLINE + 60)
def test_nodes_inside_comfyui(comfyui_path: Path, tmp_path: Path) -> None:
    check("not grid", comfyui_path, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 60)
def test_long_cases_inside_comfyui(comfyui_path: Path, tmp_path: Path) -> None:
    check("long and not grid", comfyui_path, tmp_path)


def check(markers: str, comfyui_path: Path, tmp_path: Path) -> None:
    """Run the tests that have these markers and do not need a newer ComfyUI."""
    arguments = [str(FOLDER)]
    if comfyui_path != max(comfy_paths.candidates(), key=comfy_paths.release):
        markers += " and not newest"
        arguments += ["--cases", str(CASES)]
    with (tmp_path / "output").open("w+") as output:
        arguments += ["-m", markers]
        code = run_inside(comfyui_path, arguments, runtime=tmp_path / "run", output=output, deadline=DEADLINE)
        output.seek(0)
        text = output.read()
    print(text)
    assert code == 0, failures(text)[-8000:]


def failures(output: str) -> str:
    """Return what pytest printed of each failure, without what passed and what was skipped."""
    report = re.split("^=+ (?:ERRORS|FAILURES) =+$", output, maxsplit=1, flags=re.MULTILINE)[-1]
    return "\n".join(line for line in report.splitlines() if not line.startswith("SKIPPED"))


@pytest.mark.grid
@pytest.mark.timeout(GRID_DEADLINE + 60)
def test_the_grid_inside_comfyui(comfyui_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = os.environ.get("PARALLEL_DIT_GRID")
    arguments = ["-m", "grid", *(["-k", chosen] if chosen else []), str(FOLDER)]
    with capfd.disabled():
        assert run_inside(comfyui_path, arguments, runtime=tmp_path / "run", deadline=GRID_DEADLINE) == 0
