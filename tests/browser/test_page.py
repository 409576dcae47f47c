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
PROMPT = "async () => (await window.app.graphToPrompt()).output"


def queued(page: "Page") -> dict[str, tuple[str, dict[str, Any]]]:
    """The prompt that the page would queue: class and inputs by node."""
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
