"""A headless Chromium on a real ComfyUI's web page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts import install
from scripts.comfy_server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 600
"""Seconds to wait for ComfyUI and its page: others may use the machine, too."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder ``browser``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def page_server(comfyui_path: Path) -> Iterator[ComfyServer]:
    """A running ComfyUI that serves its web page."""
    frontend = install.frontend_folder(comfyui_path)
    if not frontend.is_dir():
        pytest.skip(f"the web page of {comfyui_path} is not installed: bash scripts/test.sh")
    server = ComfyServer(comfyui_path, frontend=frontend)
    try:
        server.start(PATIENCE)
        server.client.request(
            "/settings/Comfy.TutorialCompleted", True
        )  # otherwise a dialog for new users covers the page
        # Drawn by the processor, which the ranks need, too.
        server.client.request("/settings/LiteGraph.Canvas.MaximumFps", 10)
        yield server
    finally:
        left = server.stop()
    assert not left, f"processes were left after stop: {left}"


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(ARGUMENTS))
        yield browser
        browser.close()


def _loaded(server: ComfyServer, browser: "Browser") -> "Page":
    page = browser.new_page(viewport={"width": 1600, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(server.client.url, wait_until="domcontentloaded")
    page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=1000 * PATIENCE)
    return page


@pytest.fixture
def page(page_server: ComfyServer, browser: "Browser") -> "Iterator[Page]":
    """ComfyUI's loaded page."""
    page = _loaded(page_server, browser)
    yield page
    page.close()


@pytest.fixture(scope="module")
def one_page(page_server: ComfyServer, browser: "Browser") -> "Iterator[Page]":
    """ComfyUI's page for tests that leave nothing behind that others see: to load one takes many seconds."""
    page = _loaded(page_server, browser)
    yield page
    page.close()
