"""Runs ``tests/inside_comfyui`` inside a process of each ComfyUI version."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import comfy_paths, processes

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 900.0


@pytest.mark.timeout(DEADLINE + 60)
def test_nodes_inside_comfyui(comfyui_path: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    environment = os.environ | {
        "PARALLEL_DIT_INSIDE_COMFYUI": "1",
        "PARALLEL_DIT_RUNTIME": str(runtime),
        "PYTHONPATH": os.pathsep.join([str(comfyui_path), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-o", "pythonpath=", "-o", "addopts=--import-mode=importlib -p no:cacheprovider", "-q", "-rs"]
    newest = max(comfy_paths.candidates(), key=comfy_paths.release)
    markers = [] if comfyui_path == newest else ["-m", "not newest"]
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    try:
        completed = subprocess.run(
            [*command, *options, *markers, str(ROOT / "tests" / "inside_comfyui")],
            cwd=comfyui_path, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
    finally:
        processes.kill(processes.processes_of(runtime))
    print(completed.stdout)
    assert completed.returncode == 0, f"{completed.stdout[-6000:]}\n{completed.stderr[-2000:]}"
