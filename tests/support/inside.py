"""Runs tests of ``tests/inside_comfyui`` in a process of a ComfyUI.

By hand: ``python -m tests.support.inside ~/ComfyUI -k flux tests/inside_comfyui/models``, with any arguments of pytest.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from scripts import install, processes
from scripts.comfy_paths import ROOT

FOLDER = ROOT / "tests" / "inside_comfyui"
BY_HAND = 3600.0
"""Seconds that tests may take that are run by hand."""


def run_inside(
    comfyui_path: Path,
    arguments: Sequence[str],
    *,
    runtime: Path,
    output: IO[str] | None = None,
    deadline: float,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run tests and return pytest's exit status. No process of theirs is left.

    Args:
        comfyui_path: the ComfyUI to run them in.
        arguments: pytest's, which say which tests.
        runtime: the folder of their backend.
        output: takes what they print, instead of the terminal.
        deadline: seconds.
        variables: further variables of the environment.
    """
    path = [install.packages_folder(comfyui_path), comfyui_path, ROOT]
    environment = os.environ | {
        "PARALLEL_DIT_INSIDE_COMFYUI": "1",
        "PARALLEL_DIT_RUNTIME": str(runtime),
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }
    settings = ("pythonpath=", "addopts=--import-mode=importlib", "cache_dir=.venv/pytest/in-process")
    options = [part for setting in settings for part in ("-o", setting)] + ["-q", "-rfEs"]
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    try:
        return subprocess.run(
            [*command, *options, *arguments],
            cwd=comfyui_path, env=environment, stdout=output, stderr=output and subprocess.STDOUT, timeout=deadline,
            check=False,
        ).returncode  # fmt: skip
    finally:
        processes.kill(processes.processes_of(runtime))


def main(comfyui: str, *arguments: str) -> int:
    """Run tests with these arguments of pytest, whose paths may be relative to the repository."""
    whole = [str(ROOT / each) if (ROOT / each.partition("::")[0]).exists() else each for each in arguments]
    with tempfile.TemporaryDirectory(prefix="inside-") as runtime:
        return run_inside(Path(comfyui).expanduser().resolve(), whole, runtime=Path(runtime), deadline=BY_HAND)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
