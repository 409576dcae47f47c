"""The quickstart as a user runs it, with and without ComfyUI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from scripts import comfy_paths, processes

STARTED_BY = "PARALLEL_DIT_TEST"
"""A variable that all processes of one quickstart inherit, which tells them from those of other runs."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--client",), marks=pytest.mark.long)], ids=["comfyui", "client"]
)
def test_quickstart_makes_image_and_video_and_leaves_no_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not options and not comfy_paths.candidates():
        pytest.skip("no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI")
    command = [sys.executable, "-m", "scripts.quickstart", "--output", str(tmp_path), *options]
    completed = subprocess.run(
        command, cwd=comfy_paths.ROOT, env=os.environ | {STARTED_BY: str(tmp_path)}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert ("Without ComfyUI" in completed.stdout) == bool(options), completed.stdout
    with Image.open(tmp_path / "image.png") as image, Image.open(tmp_path / "video.webp") as video:
        assert image.size == (160, 160)
        assert getattr(video, "n_frames", 1) == 17
    differences = [int(number) for number in re.findall(r"largest pixel difference.*: (\d+) of 255", completed.stdout)]
    assert len(differences) == 2, completed.stdout
    assert max(differences) <= 1, completed.stdout
    assert not processes.describe(processes.find(STARTED_BY, lambda by: by == str(tmp_path)))
