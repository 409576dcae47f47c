"""How the panel looks and reads, in states that are made up.

``PARALLEL_DIT_PICTURES=/folder`` saves a picture of each.
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import panel_status

if TYPE_CHECKING:
    from playwright.sync_api import Page

PUSH = """(shown) => window.app.api.dispatchEvent(new CustomEvent("parallel_dit.status", { detail: shown }))"""
STATES = {
    "3 GPUs": panel_status.shown([panel_status.rank(i) for i in range(3)]),
    "8 GPUs": panel_status.shown([panel_status.rank(i, host="b" if i > 3 else "") for i in range(8)]),
    "long error": panel_status.shown([panel_status.rank(i) for i in range(2)], trouble=panel_status.LONG),
    "no backend": panel_status.OFF,
    "two CPU processes": panel_status.shown(
        [panel_status.rank(i, device="cpu", device_name="CPU", device_memory=0, load=None) for i in range(2)]
    ),
}
THEMES = ("dark", "light")
WIDTHS = (1280, 800)
WIDE = """() => [...document.querySelectorAll(".pdit-panel, .pdit-panel *")]
    .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== "hidden"
        && each.clientWidth > 0 && !(each instanceof SVGElement) && getComputedStyle(each).display !== "inline")
    .map((each) => each.className + ": " + each.textContent.slice(0, 80))"""


def axe() -> Path:
    """The accessibility checker that its Python package brings along."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe is not installed: pip install axe-playwright-python")
    return Path(found.origin).with_name("axe.min.js")


def open_panel(page: "Page") -> None:
    if not page.locator(".pdit-panel").count():
        page.locator(".parallel-dit-tab-button").click()
    page.locator(".pdit-panel").wait_for()


@pytest.fixture(params=THEMES)
def themed(request: pytest.FixtureRequest, one_page: "Page") -> "Page":
    one_page.evaluate("(name) => window.app.extensionManager.setting.set('Comfy.ColorPalette', name)", request.param)
    open_panel(one_page)
    one_page.locator(".pdit-panel[data-state]").wait_for()  # the server's own state has come
    return one_page


@pytest.mark.newest
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.daily(10)
def test_every_state_fits_and_is_accessible(
    themed: "Page", state: str, width: int, request: pytest.FixtureRequest
) -> None:
    page = themed
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(PUSH, STATES[state])
    page.wait_for_timeout(300)
    if folder := os.environ.get("PARALLEL_DIT_PICTURES"):
        theme = request.node.callspec.params["themed"]
        page.screenshot(path=Path(folder) / f"{state}, {theme}, {width}.png")
    assert page.evaluate(WIDE) == []
    page.evaluate(axe().read_text(encoding="utf-8"))
    result: Any = page.evaluate("() => axe.run('.pdit-panel')")
    serious = [each for each in result["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"]) for each in serious] == []


def test_the_panel_says_what_it_gets(page: "Page") -> None:
    open_panel(page)
    page.locator(".pdit-panel[data-state]").wait_for()
    page.evaluate(PUSH, STATES["8 GPUs"])
    text = page.locator(".pdit-panel").inner_text()
    for words in (
        "At work", "GPU 0 · NVIDIA H100 80GB HBM3", "GPU 7 · NVIDIA H100 80GB HBM3 on b", "Sampling, step 12 of 50",
        "60.0 GiB of 80.0 GiB, 41.0 GiB of it this process", "Load: 97 %", "12 of 50 steps", "about 87 s left",
        "2 more wait.", "cfg=2", "ulysses=4", "shard_weights", "Chosen automatically.",
        "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors, bfloat16: transformer, transformer_2, vae",
        "Ends after 10 min without work.",
    ):  # fmt: skip
        assert words in text, words
    assert page.locator(".pdit-device").count() == 8
    page.evaluate(PUSH, STATES["long error"])
    text = page.locator(".pdit-panel").inner_text()
    assert "illegal memory access" in text
    assert "Queue the prompt again: the processes start anew." in text


def test_markup_in_what_the_server_says_stays_text(page: "Page") -> None:
    open_panel(page)
    page.locator(".pdit-panel[data-state]").wait_for()
    evil = "<img src=x onerror='window.hacked = true'>"
    page.evaluate(PUSH, panel_status.shown([panel_status.rank(0, device_name=evil, host=evil)], trouble=evil))
    page.wait_for_timeout(300)
    assert evil in page.locator(".pdit-panel").inner_text()
    assert page.evaluate("() => window.hacked") is None


def test_buttons_are_reached_and_pressed_by_keyboard(page: "Page") -> None:
    open_panel(page)
    page.locator(".pdit-panel[data-state]").wait_for()
    page.evaluate(PUSH, STATES["3 GPUs"])
    page.locator("[data-action=start]").focus()
    for name in ("stop", "unload", "cancel", "doctor", "report", "parallel"):
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.dataset.action") == name
    assert page.locator("[data-action=start]").get_attribute("aria-disabled") == "true"
    assert page.locator("[data-action=stop]").get_attribute("aria-disabled") == "false"


def test_the_panel_speaks_chinese(page: "Page") -> None:
    page.evaluate("() => window.app.extensionManager.setting.set('Comfy.Locale', 'zh')")
    try:
        open_panel(page)
        page.locator(".pdit-panel[data-state]").wait_for()
        page.evaluate(PUSH, STATES["3 GPUs"])
        text = page.locator(".pdit-panel").inner_text()
        assert "工作中" in text
        assert "第 12 步，共 50 步" in text  # noqa: RUF001
        assert "At work" not in text
    finally:
        page.evaluate("() => window.app.extensionManager.setting.set('Comfy.Locale', 'en')")
