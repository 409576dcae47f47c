"""The page *API and headless use* on a real ComfyUI: its blocks of bash run as they are, one after the other."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from scripts.comfy_server import ComfyServer
from tests.unit.docs import commands

ROOT = commands.ROOT
BLOCKS = [block for language, block in commands.blocks(ROOT / "docs" / "api.md") if language == "bash"]


@pytest.mark.newest
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl and jq are not installed")
def test_the_page_runs(new_server: Callable[..., ComfyServer], tmp_path: Path) -> None:
    server = new_server(env={"PARALLEL_DIT_CPU_RANKS": "2"})
    (tmp_path / "workflows").symlink_to(ROOT / "workflows")
    environment = {
        **os.environ, "COMFYUI": server.client.url, "PARALLEL_DIT_RUNTIME": str(server.runtime),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    printed = []
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}{done.stdout}{done.stderr}{server.log_text()[-2000:]}"
        printed.append(done.stdout)
    with Image.open(tmp_path / "image.png") as image:
        assert image.size == (160, 160)
    assert any('"ranks"' in text for text in printed)
    assert any("Forward" in text or "Sample" in text or "Decode" in text for text in printed)
    assert printed[-1] == "stopped\n"


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 5
