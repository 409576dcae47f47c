"""A new user's first minutes: a fresh ComfyUI, an official template, and a picture that two ranks make.

``PARALLEL_DIT_SCREENS=docs/screens`` saves the pictures of the documentation's first page.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from parallel_backend.client import query
from parallel_backend.protocol.endpoint import Endpoint
from scripts import install, official_templates
from scripts.comfy_server import ComfyServer
from scripts.install import templates_folder
from tests.browser import pictures
from tests.support import small_official

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page

pytestmark = [
    pytest.mark.newest,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh"),
]
TEMPLATE, CATEGORY = "image_minimax_h3_t2i", "Image"
FILES = {
    "UNETLoader": "diffusion_models", "VAELoader": "vae", "CLIPLoader": "text_encoders",
    "LoraLoaderModelOnly": "loras",
}  # fmt: skip
"""The folder of what a loader of the template loads."""
MOST_CLICKS = 3
PATIENCE = 60_000
SMALL = """() => {
    const selector = window.app.graph._nodes.find((node) => node.type === "ResolutionSelector")
    selector.widgets.find((widget) => widget.name === "megapixels").value = 0.1
}"""
"""A size for a machine without a GPU."""
PICTURE = """() => {
    const image = window.app.graph._nodes.find((node) => node.type === 'SaveImage')?.imgs?.[0]
    return image?.complete ? [image.naturalWidth, image.naturalHeight] : null
}"""


def files_of(graph: dict[str, Any]) -> set[tuple[str, str]]:
    """Return folder and name of each file that the template's loaders load."""
    levels = [graph, *graph.get("definitions", {}).get("subgraphs", [])]
    nodes = [node for level in levels for node in level["nodes"] if node["type"] in FILES]
    return {(FILES[node["type"]], node["widgets_values"][0]) for node in nodes}


@pytest.fixture(scope="module")
def fresh(comfyui_path: "Path") -> Iterator[ComfyServer]:
    """A ComfyUI that nobody has opened yet, with this extension, and the template's files in their folders."""
    server = ComfyServer(comfyui_path, frontend=install.frontend_folder(comfyui_path))
    try:
        small_official.shrink_core(server.base)
        files = files_of(official_templates.graph(TEMPLATE))
        small_official.write(comfyui_path, [server.base / "models" / folder / name for folder, name in sorted(files)])
        server.start(600)
        yield server
    finally:
        left = server.stop()
    assert not left, f"processes were left after stop: {left}"


class Hand:
    """Presses what a user would press, and counts."""

    def __init__(self) -> None:
        self.clicks = 0

    def press(self, place: "Locator") -> None:
        """Press a place of the page."""
        place.wait_for(timeout=PATIENCE)
        place.click()
        self.clicks += 1


def official(page: "Page") -> None:
    """Serve the official templates, which are a package beside ComfyUI."""

    def answer(route: Any) -> None:
        file = templates_folder() / route.request.url.split("/templates/", 1)[1].split("?")[0]
        if file.is_file():
            route.fulfill(path=file, content_type="application/json")
        else:
            route.fulfill(status=404)

    page.route("**/templates/*", answer)


def scroll_to(page: "Page", place: "Locator") -> None:
    """Scroll until a place of the list in the middle of the page is in sight: the list grows as one scrolls."""
    page.mouse.move(900, 600)
    page.wait_for_timeout(3000)
    for _ in range(200):
        if place.count() and place.is_visible():
            break
        page.mouse.wheel(0, 400)
        page.wait_for_timeout(300)
    place.scroll_into_view_if_needed()
    page.wait_for_timeout(1500)


def test_screens_from_the_first_load_to_a_parallel_picture(fresh: ComfyServer, browser: "Browser") -> None:
    page, hand = browser.new_page(viewport={"width": 1440, "height": 900}), Hand()
    page.set_default_timeout(PATIENCE)
    official(page)
    page.goto(fresh.client.url, wait_until="domcontentloaded")
    page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=PATIENCE)
    notice = page.locator(".pdit-contact")
    notice.wait_for(timeout=PATIENCE)
    # ComfyUI itself shows its templates to a new user.
    dialog, template = page.get_by_role("dialog"), page.get_by_test_id(f"template-workflow-{TEMPLATE}")
    hand.press(dialog.get_by_text(CATEGORY, exact=True).first)
    scroll_to(page, template)
    pictures.save(page, "start-1-template")
    hand.press(template)
    page.wait_for_function("() => window.app.graph._nodes.some((node) => node.type === 'SaveImage')", timeout=PATIENCE)
    page.evaluate(SMALL)
    page.wait_for_timeout(1500)
    pictures.save(page, "start-2-notice")
    hand.press(notice.get_by_role("button", name="Make parallel"))
    toast = page.locator(".p-toast-message").filter(has_text="The workflow is parallel")
    toast.first.wait_for(timeout=PATIENCE)
    assert "Put in: 1 Parallel Model, 1 Parallel VAE." in toast.first.inner_text()
    page.wait_for_timeout(500)
    pictures.save(page, "start-3-parallel")
    assert hand.clicks <= MOST_CLICKS
    page.get_by_test_id("queue-button").first.click()
    page.wait_for_function(PICTURE, timeout=PATIENCE)
    page.wait_for_timeout(1000)
    pictures.save(page, "start-4-picture")
    status = query.status(Endpoint(folder=fresh.runtime))
    assert [rank.steps > 0 for rank in status.ranks] == [True, True]
    for rank in status.ranks:
        assert {"transformer", "vae"} <= {part for model in rank.models for part in model.parts}
    assert json.loads(fresh.client.request("/settings"))["ParallelDiT.Met"] is True
    page.close()
