"""Our conversion of ComfyUI's official templates against the web page's own."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from scripts import official_templates, workflows
from scripts.comfy_api import Prompt
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
    converted, wrong = 0, list[str]()
    for path in sorted(templates_folder().glob("*.json")):
        if path.name.startswith("api_") or not any(name in path.name for name in NAMES):
            continue
        if not official_templates.classes(path.stem) <= known.keys():
            continue
        theirs = page.evaluate(PROMPT, json.loads(path.read_text(encoding="utf-8")))
        ours = official_templates.prompt(path.stem, lambda name: known[name])
        wrong += [f"{path.stem} {line}" for line in unlike(ours, theirs, known)]
        converted += 1
    assert not wrong, "\n".join(line[:200] for line in wrong)
    assert converted >= 20


def unlike(ours: Prompt, theirs: Prompt, known: dict[str, Any]) -> Iterator[str]:
    """Yield what differs, but for inputs that the page sends and the node's class does not have."""
    for key in ours.keys() ^ theirs.keys():
        yield f"{key} is in one of them"
    for key in ours.keys() & theirs.keys():
        kind, inputs = theirs[key]["class_type"], theirs[key]["inputs"]
        declared = workflows.declared_inputs(known[kind])
        for name in ours[key]["inputs"].keys() | inputs.keys():
            mine, other = ours[key]["inputs"].get(name), inputs.get(name)
            if mine != other and (name in declared or name in ours[key]["inputs"]):
                yield f"{key} {kind} {name}: {mine!r} instead of {other!r}"
