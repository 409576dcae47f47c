"""The quickstart as a user runs it, with and without ComfyUI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

from scripts import comfy_paths, processes


def started_since(before: set[int]) -> str:
    """Describe the quickstart's running processes that are not in ``before``, a set of pids."""
    running = processes.find(processes.RUNTIME, lambda runtime: runtime.startswith("/tmp/pdit-"))
    return processes.describe([process for process in running if process.pid not in before])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--client",)], ids=["comfyui", "client"])
def test_quickstart_makes_image_and_video_and_leaves_no_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not options and not comfy_paths.candidates():
        pytest.skip("no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI")
    before = set(psutil.pids())
    command = [sys.executable, "-m", "scripts.quickstart", "--output", str(tmp_path), *options]
    completed = subprocess.run(
        command, cwd=comfy_paths.ROOT, env=os.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert ("Without ComfyUI" in completed.stdout) == bool(options), completed.stdout
    with Image.open(tmp_path / "image.png") as image, Image.open(tmp_path / "video.webp") as video:
        assert image.size == (160, 160)
        assert getattr(video, "n_frames", 1) == 17
    differences = [int(number) for number in re.findall(r"largest pixel difference.*: (\d+) of 255", completed.stdout)]
    assert len(differences) == 2, completed.stdout
    assert max(differences) <= 1, completed.stdout
    assert not started_since(before)
