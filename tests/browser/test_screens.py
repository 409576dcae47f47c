"""Pictures of the page for the README and the documentation, each of something that a test asks for.

``PARALLEL_DIT_SCREENS=docs/screens`` saves them. Files of models are empty where nothing runs.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from scripts import workflows
from scripts.comfy_server import ComfyServer
from tests.browser import pictures
from tests.browser.test_page import IMAGE_SIZE, OPEN
from tests.browser.test_panel_looks import open_panel

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.newest, pytest.mark.timeout(1800)]
PATIENCE = 600_000
NATIVE = "Included model, text to image (native nodes)"
TEMPLATES = {
    "template-z-image": "Z-Image turbo, text to image",
    "template-wan": "Wan 2.2 14B, text to video",
}
PLAIN = {"Comfy.Graph.CanvasInfo": False, "Comfy.Minimap.Visible": False, "ParallelDiT.Met": True}
"""Settings of a page without what is not ours."""
SET = "([id, value]) => window.app.extensionManager.setting.set(id, value)"
FIT = "() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')"
RED = "() => window.app.graph._nodes.filter((node) => node.has_errors || !node.type).map((node) => node.title)"
LAYOUTS = """() => {
    const add = (type, x, y) => {
        const node = window.LiteGraph.createNode(type)
        node.pos = [x, y]
        window.app.graph.add(node)
        return node
    }
    const [folded, unfolded, model] = [
        add("ParallelLayout", 0, 0), add("ParallelLayout", 340, 0), add("ParallelModel", 720, 0),
    ]
    for (const [name, value] of Object.entries({ mode: "degrees", cfg: 2, ulysses: 2 })) {
        unfolded.widgets.find((widget) => widget.name === name).value = value
    }
    unfolded.connect(0, model, model.inputs.findIndex((input) => input.name === "layout"))
    unfolded.showAdvanced = true
    return [folded, unfolded, model].map((node) => node.id)
}"""


@pytest.fixture
def plain(page_server: ComfyServer) -> Iterator[None]:
    """Files of the names that the templates want, and a page of a user who has seen the notice."""
    for name in TEMPLATES.values():
        for file in workflows.needed_files(name):
            place = page_server.base / "models" / file["directory"] / file["name"]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    for setting, value in PLAIN.items():
        page_server.client.request(f"/settings/{setting}", value)
    yield
    page_server.client.interrupt()


def opened(page: "Page", name: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 810})
    page.evaluate(OPEN, name)
    page.evaluate(FIT)
    page.wait_for_timeout(1500)


@pytest.mark.parametrize("picture", TEMPLATES)
def test_a_template_has_all_it_needs(plain: None, page: "Page", picture: str) -> None:
    opened(page, TEMPLATES[picture])
    assert page.evaluate(RED) == []
    assert page.get_by_role("dialog").count() == 0
    pictures.save(page, picture)


@pytest.mark.long
def test_the_finished_picture(plain: None, page: "Page") -> None:
    opened(page, NATIVE)
    page.get_by_test_id("queue-button").first.click()
    page.wait_for_function(IMAGE_SIZE, timeout=PATIENCE)
    page.wait_for_timeout(1500)  # the canvas draws the image with the next frame
    pictures.save(page, "template-shapes")


@pytest.mark.long
def test_the_panel_while_it_samples(plain: None, page: "Page") -> None:
    page.set_viewport_size({"width": 1280, "height": 860})
    open_panel(page)
    page.evaluate(OPEN, NATIVE)
    page.evaluate(FIT)
    steps = """(seed) => {
        const { widgets } = window.app.graph._nodes.find((node) => node.type === "KSampler")
        widgets.find((widget) => widget.name === "steps").value = 400
        widgets.find((widget) => widget.name === "seed").value = seed
    }"""
    page.evaluate(steps, int(time.time()))
    page.get_by_test_id("queue-button").first.click()
    page.locator(".pdit-history").wait_for(timeout=PATIENCE)
    page.locator(".pdit-panel").get_by_text("left").first.wait_for(timeout=PATIENCE)
    page.wait_for_timeout(4000)
    text = page.locator(".pdit-panel").inner_text()
    assert "CPU process 1" in text
    assert "of 400 steps" in text
    pictures.save(page, "panel")


def test_the_layout_node_folded_and_unfolded(plain: None, page: "Page") -> None:
    page.set_viewport_size({"width": 1280, "height": 760})
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", True])
    try:
        page.evaluate("() => window.app.graph.clear()")
        ids: list[Any] = page.evaluate(LAYOUTS)
        page.evaluate(FIT)
        page.wait_for_timeout(2500)
        page.evaluate(FIT)
        page.wait_for_timeout(1000)
        folded, unfolded, model = (page.locator(f".lg-node[data-node-id='{each}']") for each in ids)
        assert folded.get_by_text("ring", exact=True).count() == 0
        assert unfolded.get_by_text("ring", exact=True).count() == 1
        assert folded.get_by_text("mode", exact=True).count() == 1
        assert model.get_by_text("all (2 CPU processes)").count() == 1
        boxes = [each.bounding_box() for each in (folded, unfolded, model)]
        left, top = min(box["x"] for box in boxes if box), min(box["y"] for box in boxes if box)
        right = max(box["x"] + box["width"] for box in boxes if box)
        bottom = max(box["y"] + box["height"] for box in boxes if box)
        clip = {"x": left - 16, "y": top - 16, "width": right - left + 32, "height": bottom - top + 32}
        pictures.save(page, "layout", clip=clip)
    finally:
        page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])
