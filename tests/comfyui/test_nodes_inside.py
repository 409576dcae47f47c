"""Runs ``tests/inside_comfyui`` inside a process of each ComfyUI version."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from scripts import comfy_paths, install, processes

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 1800.0
"""Seconds: several times what it takes, since the oldest one may run beside everything else."""
GRID_DEADLINE = 7200.0


@pytest.mark.timeout(DEADLINE + 60)
def test_nodes_inside_comfyui(comfyui_path: Path, tmp_path: Path) -> None:
    newest = max(comfy_paths.candidates(), key=comfy_paths.release)
    markers = "not grid" if comfyui_path == newest else "not grid and not newest"
    with (tmp_path / "output").open("w+") as output:
        code = run_inside(comfyui_path, markers, tmp_path / "run", output, DEADLINE)
        output.seek(0)
        text = output.read()
    print(text)
    assert code == 0, text[-8000:]


@pytest.mark.grid
@pytest.mark.timeout(GRID_DEADLINE + 60)
def test_the_grid_inside_comfyui(comfyui_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert run_inside(comfyui_path, "grid", tmp_path / "run", None, GRID_DEADLINE) == 0


def run_inside(comfyui_path: Path, markers: str, runtime: Path, output: IO[str] | None, deadline: float) -> int:
    """Run the tests with these markers and return pytest's exit status. No process of theirs is left.

    Args:
        comfyui_path: the ComfyUI to run them in.
        markers: pytest's expression.
        runtime: the folder of their backend.
        output: takes what they print, instead of the terminal.
        deadline: seconds.
    """
    path = [install.packages_folder(comfyui_path), comfyui_path, ROOT]
    environment = os.environ | {
        "PARALLEL_DIT_INSIDE_COMFYUI": "1",
        "PARALLEL_DIT_RUNTIME": str(runtime),
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-o", "pythonpath=", "-o", "addopts=--import-mode=importlib -p no:cacheprovider", "-q", "-rs"]
    if "grid" in markers.split() and (chosen := os.environ.get("PARALLEL_DIT_GRID")):
        options += ["-k", chosen]
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    try:
        return subprocess.run(
            [*command, *options, "-m", markers, str(ROOT / "tests" / "inside_comfyui")],
            cwd=comfyui_path, env=environment, stdout=output, stderr=output and subprocess.STDOUT, timeout=deadline,
            check=False,
        ).returncode  # fmt: skip
    finally:
        processes.kill(processes.processes_of(runtime))
