"""The example workflows: both formats agree, the templates browser finds them, and each one runs."""

import json
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallel_backend.layout.parallel_layout import AXES
from scripts import comfy_paths, official_templates, workflows
from scripts.comfy_api import ComfyClient, ExecutionFailed
from scripts.comfy_events import Events
from scripts.comfy_server import ComfyServer
from tests.comfyui.helpers import difference, pixels

NAMES = workflows.names()
VARIANTS = ("native nodes", "ParallelSampler")
EXTENSION = "comfyui-parallel-dit"


def test_every_kind_has_a_workflow_for_each_variant() -> None:
    with_files = {name for name in NAMES if workflows.needs_download(name)}
    included = {f"Included model, text to {kind} ({variant})" for kind in ("image", "video") for variant in VARIANTS}
    assert included | with_files == set(NAMES)
    assert {path.stem for path in workflows.FOLDER.glob("*.json")} == set(NAMES)


def test_every_loaded_file_can_be_downloaded_into_its_folder() -> None:
    for name in NAMES:
        loaded = {
            value.removeprefix("diffusion_models/")
            for node in workflows.api(name).values()
            for value in node["inputs"].values()
            if str(value).endswith(".safetensors")
        }
        assert loaded == {file["name"] for file in workflows.needed_files(name)}
        for file in workflows.needed_files(name):
            assert file["url"].startswith("https://")
            assert file["url"].endswith("/" + file["name"])
            assert file["directory"] in ("checkpoints", "diffusion_models", "text_encoders", "vae", "loras")


def test_every_folder_is_loaded_by_its_name() -> None:
    for name in NAMES:
        for folder in workflows.needed_folders(name):
            loaded = [node["inputs"].get("model_name") for node in workflows.api(name).values()]
            assert folder["name"] in loaded
            assert folder["directory"] == "diffusers"
            assert folder["repository"].endswith(f"/{folder['name']}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(7)
def test_graph_converts_to_the_stored_api_prompt(client: ComfyClient, comfyui_path: Path, name: str) -> None:
    info = client.object_info()
    if workflows.needed_release(name) > comfy_paths.release(comfyui_path):
        pytest.skip("the example needs a newer ComfyUI")
    queued = official_templates.prompt_of(workflows.graph(name), lambda kind: info[kind])
    assert workflows.with_options(workflows.flat(queued), info) == workflows.with_options(workflows.api(name), info)


def test_templates_browser_lists_every_workflow_with_a_thumbnail(client: ComfyClient) -> None:
    assert set(client.get("/workflow_templates")[EXTENSION]) == set(NAMES)
    for name in NAMES:
        path = f"/api/workflow_templates/{EXTENSION}/{urllib.parse.quote(name)}"
        assert json.loads(client.request(f"{path}.json")) == workflows.graph(name)
        assert client.request(f"{path}.jpg")[:2] == b"\xff\xd8"


@pytest.mark.parametrize("kind", ["image", pytest.param("video", marks=pytest.mark.newest)])
def test_both_variants_give_the_same_frames(client: ComfyClient, kind: str) -> None:
    frames = []
    for variant in VARIANTS:
        prompt = workflows.api(f"Included model, text to {kind} ({variant})")
        size = prompt["4"]["inputs"]
        frames.append(pixels(client, client.run(prompt, deadline=240.0)))
        assert frames[-1].shape == (size["length"], size["height"], size["width"], 3)
        assert frames[-1].std() > 5, "the image is blank"
    assert difference(*frames) <= 1


def test_status_reports_request_layout_and_rank_processes_during_sampling(
    server: ComfyServer, client: ComfyClient
) -> None:
    prompt = workflows.api(f"Included model, text to image ({VARIANTS[1]})")
    next(node["inputs"] for node in prompt.values() if "steps" in node["inputs"])["steps"] = 2000
    with Events(client) as events:
        prompt_id = client.submit(prompt)
        events.wait(lambda event: event.kind == "progress" and event.data["value"] >= 30, 240.0)
    status = status_json(server)
    client.interrupt()
    with pytest.raises(ExecutionFailed, match="Interrupted"):
        client.wait(prompt_id)
    assert (status["state"], status["running"] is not None, status["queued"]) == ("busy", True, [])
    assert {axis: status["layout"][axis] for axis in AXES if status["layout"][axis] > 1} == {"ulysses": 3}
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert psutil.Process(status["pid"]).environ()["PARALLEL_DIT_RUNTIME"] == str(server.runtime)
    for rank in status["ranks"]:
        process = psutil.Process(rank["pid"])
        assert process.ppid() == status["pid"]
        assert process.environ()["RANK"] == str(rank["rank"])
        assert rank["memory"] == pytest.approx(process.memory_info().rss, rel=0.2)
        (model,) = rank["models"]
        assert Path(model["path"]).samefile(comfy_paths.ROOT / "checkpoints" / "shapes")
        assert "transformer" in model["parts"]
        assert rank["steps"] > 0


def status_json(server: ComfyServer) -> dict[str, Any]:
    """Return the output of ``status --json``."""
    command = [sys.executable, "-m", "parallel_backend", "status", "--json"]
    completed = subprocess.run(
        command, cwd=comfy_paths.ROOT, env=server.environment(), capture_output=True, timeout=60, check=True
    )
    answer: dict[str, Any] = json.loads(completed.stdout)
    return answer
