"""With one machine, ComfyUI's own process imports nothing of what only several machines need."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.comfy_api import PromptRejected
from scripts.comfy_server import ComfyServer
from scripts.install import packages_folder
from tests.comfyui.prompts import START, prompt
from tests.support import closed_room, tiny

pytestmark = pytest.mark.newest


@pytest.mark.long
def test_a_prompt_needs_nothing_of_other_machines(
    new_server: Callable[..., ComfyServer], comfyui_path: Path, tmp_path: Path
) -> None:
    path = closed_room.python_path(tmp_path, packages_folder(comfyui_path))
    server = new_server(
        lambda base: tiny.write(base / "models" / "diffusers" / "tiny"),
        env={"PARALLEL_DIT_CPU_RANKS": "2", "PYTHONPATH": path},
    )
    assert server.pid in closed_room.watched(tmp_path)
    assert server.client.run(prompt("ParallelSampler"), deadline=START).files
    with pytest.raises(PromptRejected, match=closed_room.SENTENCE):
        server.client.submit(prompt("ParallelSampler", devices="0,0@b"))
