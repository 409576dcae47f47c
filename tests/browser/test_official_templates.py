"""Our conversion of ComfyUI's official templates against the web page's own."""

import json
from typing import TYPE_CHECKING

import pytest

from scripts import official_templates
from scripts.comfy_server import ComfyServer
from scripts.install import templates_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = """async (graph) => {
    await window.app.loadGraphData(graph, true, false)
    return (await window.app.graphToPrompt()).output
}"""
NAMES = ("minimax_h3", "ltx2_")


@pytest.mark.newest
@pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh")
def test_templates_become_the_prompts_that_the_page_queues(page: "Page", page_server: ComfyServer) -> None:
    known = page_server.client.object_info()
    converted = 0
    for path in sorted(templates_folder().glob("*.json")):
        if path.name.startswith("api_") or not any(name in path.name for name in NAMES):
            continue
        if not official_templates.classes(path.stem) <= known.keys():
            continue
        theirs = page.evaluate(PROMPT, json.loads(path.read_text(encoding="utf-8")))
        ours = official_templates.prompt(path.stem, lambda name: known[name])
        assert ours.keys() == theirs.keys(), path.stem
        for key, node in theirs.items():
            assert ours[key]["class_type"] == node["class_type"]
            assert ours[key]["inputs"] == node["inputs"], (path.stem, key, node["class_type"])
        converted += 1
    assert converted >= 20
