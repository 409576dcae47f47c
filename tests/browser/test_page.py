"""What a user does: open an example workflow, press Run, see the image.

``PARALLEL_DIT_SCREENSHOT=docs/screenshot.png`` saves the finished page there.
"""

import os
from typing import TYPE_CHECKING, Any

import pytest

from scripts import comfy_paths, workflows
from scripts.comfy_server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.newest

OPEN = """async (name) => {
    const answer = await fetch(`/api/workflow_templates/comfyui-parallel-dit/${encodeURIComponent(name)}.json`)
    await window.app.loadGraphData(await answer.json(), true, true, name)
}"""
IMAGE_SIZE = """() => {
    const image = window.app.graph._nodes.find((node) => node.type === 'SaveImage')?.imgs?.[0]
    return image?.complete ? [image.naturalWidth, image.naturalHeight] : null
}"""
Queued = dict[str, tuple[str, dict[str, Any]]]
"""Class and inputs by node."""

PROMPT = "async () => (await window.app.graphToPrompt()).output"


def queued(page: "Page") -> Queued:
    """The prompt that the page would queue."""
    prompt: dict[str, dict[str, Any]] = page.evaluate(PROMPT)
    return {key: (node["class_type"], node["inputs"]) for key, node in prompt.items()}


@pytest.mark.parametrize("name", workflows.names())
def test_the_page_queues_the_prompt_of_the_api_format(page: "Page", page_server: ComfyServer, name: str) -> None:
    page.evaluate(OPEN, name)
    expected = workflows.with_options(workflows.api(name), page_server.client.object_info())
    assert queued(page) == {key: (node["class_type"], node["inputs"]) for key, node in expected.items()}


def test_run_shows_the_finished_image(page: "Page") -> None:
    name = "text to image (native nodes)"
    page.evaluate(OPEN, name)
    assert page.evaluate(IMAGE_SIZE) is None
    page.get_by_test_id("queue-button").first.click()
    page.wait_for_function(IMAGE_SIZE, timeout=300_000)
    size = workflows.api(name)["4"]["inputs"]
    assert page.evaluate(IMAGE_SIZE) == [size["width"], size["height"]]
    if target := os.environ.get("PARALLEL_DIT_SCREENSHOT"):
        page.wait_for_timeout(1000)  # the canvas draws the image with the next frame
        page.screenshot(path=str(comfy_paths.ROOT / target))


PARALLEL_MODEL = "text to image (Parallel Model, Z-Image)"
PARALLEL = {"ParallelModel": "model", "ParallelVAE": "vae"}
"""The nodes that make this workflow parallel, and the input that each one passes on."""

SET_MODE = """([types, mode]) => {
    for (const node of window.app.graph._nodes.filter((node) => types.includes(node.type))) node.mode = mode
}"""
BYPASS, MUTE = 4, 2
MAKE_SUBGRAPH = """(types) => {
    const nodes = window.app.graph._nodes.filter((node) => types.includes(node.type))
    return window.app.graph.convertToSubgraph(new Set(nodes)).node.id
}"""


def relinked(prompt: Queued, links: dict[str, list[Any] | None]) -> Queued:
    """A prompt without the nodes of ``links``: their consumers take the given link, or lose the input."""
    left: Queued = {}
    for key, (kind, inputs) in prompt.items():
        changed = {name: links.get(value[0], value) if is_link(value) else value for name, value in inputs.items()}
        if key not in links:
            left[key] = (kind, {name: value for name, value in changed.items() if value is not None})
    return left


def is_link(value: Any) -> bool:
    return isinstance(value, list)


@pytest.mark.parametrize("mode", [BYPASS, MUTE])
def test_bypassed_nodes_pass_on_what_they_get_and_muted_ones_nothing(page: "Page", mode: int) -> None:
    page.evaluate(OPEN, PARALLEL_MODEL)
    before = queued(page)
    page.evaluate(SET_MODE, [list(PARALLEL), mode])
    ours = {key: inputs[PARALLEL[kind]] for key, (kind, inputs) in before.items() if kind in PARALLEL}
    assert len(ours) == 2
    assert queued(page) == relinked(before, ours if mode == BYPASS else dict.fromkeys(ours))


@pytest.mark.parametrize("inside", [["ParallelModel"], ["UNETLoader", "ModelSamplingAuraFlow", *PARALLEL]])
def test_nodes_in_a_subgraph_keep_their_inputs(page: "Page", inside: list[str]) -> None:
    page.evaluate(OPEN, PARALLEL_MODEL)
    before = queued(page)
    subgraph = page.evaluate(MAKE_SUBGRAPH, inside)
    ids = {key: f"{subgraph}:{key}" if kind in inside else key for key, (kind, _) in before.items()}
    assert queued(page) == {
        ids[key]: (kind, {n: [ids[value[0]], value[1]] if is_link(value) else value for n, value in inputs.items()})
        for key, (kind, inputs) in before.items()
    }
