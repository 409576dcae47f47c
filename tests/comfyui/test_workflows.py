"""The example workflows: both formats agree, the templates browser finds them, and each one runs."""

import json
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from parallel_backend.layout.parallel_layout import AXES
from scripts import comfy_paths, workflows
from scripts.comfy_api import ComfyClient, ExecutionFailed, Prompt
from scripts.comfy_events import Events
from scripts.comfy_server import ComfyServer
from tests.comfyui.helpers import difference, pixels

NAMES = workflows.names()
VARIANTS = ("native nodes", "ParallelSampler")
EXTENSION = "comfyui-parallel-dit"


def to_api(graph: dict[str, Any], object_info: dict[str, Any]) -> Prompt:
    """Convert a graph to the prompt that the web page would queue: widget values by position, links by number."""
    links = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt: Prompt = {}
    for node in graph["nodes"]:
        inputs = {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        values = iter(node["widgets_values"])
        for name, (kind, options) in workflows.declared_inputs(object_info[node["type"]]).items():
            if workflows.is_widget(kind, options):
                inputs.setdefault(name, next(values, cast(Any, options.get("default"))))
                if options.get("control_after_generate"):
                    next(values)
        assert next(values, None) is None, f"{node['type']} has more values than widgets"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def test_every_kind_has_a_workflow_for_each_variant() -> None:
    with_files = {name for name in NAMES if workflows.needed_files(name)}
    assert {f"text to {kind} ({variant})" for kind in ("image", "video") for variant in VARIANTS} | with_files == set(
        NAMES
    )
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
            assert file["directory"] in ("diffusion_models", "text_encoders", "vae", "loras")


@pytest.mark.parametrize("name", NAMES)
def test_graph_converts_to_the_stored_api_prompt(client: ComfyClient, name: str) -> None:
    info = client.object_info()
    if lacking := {node["class_type"] for node in workflows.api(name).values()} - info.keys():
        pytest.skip(f"this version of ComfyUI has no {', '.join(sorted(lacking))}")
    queued = to_api(workflows.graph(name), info)
    assert workflows.with_options(queued, info) == workflows.with_options(workflows.api(name), info)


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
        prompt = workflows.api(f"text to {kind} ({variant})")
        size = prompt["4"]["inputs"]
        frames.append(pixels(client, client.run(prompt, deadline=240.0)))
        assert frames[-1].shape == (size["length"], size["height"], size["width"], 3)
        assert frames[-1].std() > 5, "the image is blank"
    assert difference(*frames) <= 1


def test_status_reports_request_layout_and_rank_processes_during_sampling(
    server: ComfyServer, client: ComfyClient
) -> None:
    prompt = workflows.api(f"text to image ({VARIANTS[1]})")
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
