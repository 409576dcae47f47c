"""The quickstart, as a user starts it, with and without ComfyUI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

from scripts import comfy_paths


def started_since(before: set[int]) -> list[str]:
    """Command lines of what a quickstart started and that was not there before."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        runtime = (process.info["environ"] or {}).get("PARALLEL_DIT_RUNTIME", "")
        if process.info["pid"] not in before and runtime.startswith("/tmp/pdit-"):
            found.append(" ".join(process.info["cmdline"]))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--client",)], ids=["comfyui", "client"])
def test_quickstart_makes_both_pictures_and_leaves_no_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not options and not comfy_paths.candidates():
        pytest.skip("no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI")
    before = set(psutil.pids())
    command = [sys.executable, "-m", "scripts.quickstart", "--output", str(tmp_path), *options]
    done = subprocess.run(
        command, cwd=comfy_paths.ROOT, env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Without ComfyUI" in done.stdout) == bool(options), done.stdout
    with Image.open(tmp_path / "image.png") as image, Image.open(tmp_path / "video.webp") as video:
        assert image.size == (160, 160)
        assert getattr(video, "n_frames", 1) == 17
    differences = [int(number) for number in re.findall(r"largest pixel difference.*: (\d+) of 255", done.stdout)]
    assert len(differences) == 2, done.stdout
    assert max(differences) <= 1, done.stdout
    assert started_since(before) == []
