"""What the page says while a prompt runs and after it: badges of nodes, and toasts.

``PARALLEL_DIT_PICTURES=/folder`` saves a picture of each.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_backend.client import query
from parallel_backend.errors import BackendError
from parallel_backend.protocol.endpoint import Endpoint
from scripts import registry
from scripts.comfy_server import ComfyServer
from tests.browser.test_page import OPEN

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NATIVE, OURS = "Included model, text to image (native nodes)", "Included model, text to image (ParallelSampler)"
SAMPLERS = {NATIVE: "KSampler", OURS: "ParallelSampler"}
PATIENCE = 600_000
NODE = "window.app.graph._nodes.find((node) => node.type === type)"
SET = f"([type, name, value]) => {{ {NODE}.widgets.find((each) => each.name === name).value = value }}"
BADGES = f"""(type) => ({NODE}.badges ?? []).map((each) => (typeof each === "function" ? each() : each).text)"""
HAS_TIME = f"(type) => ({BADGES})(type).some((each) => each.includes('s a step'))"
ADD_LAYOUT = """(degrees) => {
    const loader = window.app.graph._nodes.find((node) => node.type === "ParallelLoader")
    const layout = window.LiteGraph.createNode("ParallelLayout")
    window.app.graph.add(layout)
    layout.pos = [loader.pos[0] - 300, loader.pos[1]]
    for (const [name, value] of Object.entries({mode: "degrees", ...degrees})) {
        layout.widgets.find((each) => each.name === name).value = value
    }
    layout.connect(0, loader, loader.inputs.findIndex((input) => input.name === "layout"))
}"""
NOTHING_RUNS = "async () => (await (await fetch('/api/queue')).json()).queue_running.length === 0"
DRAWN_BY_VUE = "(on) => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)"


@pytest.fixture
def page(page: "Page", page_server: ComfyServer) -> "Iterator[Page]":
    """The page of a ComfyUI that runs nothing, before and after."""
    yield page
    page_server.client.interrupt()
    page.wait_for_function(NOTHING_RUNS, timeout=PATIENCE)
    page.evaluate(DRAWN_BY_VUE, False)


def run(page: "Page") -> None:
    page.get_by_test_id("queue-button").first.click()


def picture(page: "Page", name: str) -> None:
    if folder := os.environ.get("PARALLEL_DIT_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def toast(page: "Page", summary: str) -> "Locator":
    found = page.locator(".p-toast-message").filter(has_text=summary)
    found.first.wait_for(timeout=PATIENCE)
    return found.first


@pytest.mark.parametrize("name", [NATIVE, OURS])
@pytest.mark.daily(1)
def test_a_node_that_samples_on_ranks_shows_the_time_of_a_step(page: "Page", name: str) -> None:
    sampler = SAMPLERS[name]
    page.evaluate(OPEN, name)
    page.evaluate(SET, [sampler, "steps", 3000])
    run(page)
    page.wait_for_function(HAS_TIME, arg=sampler, timeout=PATIENCE)
    page.wait_for_function(f"(type) => ({BADGES})(type).some((each) => each.includes('left'))", arg=sampler)
    page.wait_for_timeout(1500)
    assert sum("s a step" in each for each in page.evaluate(BADGES, sampler)) == 1  # the newest alone
    assert not any("s a step" in each for each in page.evaluate(BADGES, "ParallelLoader"))
    picture(page, f"badge, {sampler}")


@pytest.mark.newest
def test_a_badge_is_drawn_in_nodes_2(page: "Page") -> None:
    page.evaluate(DRAWN_BY_VUE, True)
    page.evaluate(OPEN, OURS)
    page.evaluate(SET, ["ParallelSampler", "steps", 3000])
    run(page)
    badges = page.locator(".lg-node").filter(has_text="Parallel Sampler").get_by_text("s a step")
    badges.first.wait_for(timeout=PATIENCE)
    page.wait_for_timeout(1500)
    assert badges.count() == 1  # the newest alone
    picture(page, "badge, Nodes 2.0")


def test_the_about_page_names_the_extension_and_its_address(page: "Page") -> None:
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.get_by_role("dialog").get_by_text("About", exact=True).first.click()
    link = page.locator("a", has_text="Parallel DiT").first
    link.wait_for(timeout=PATIENCE)
    assert link.get_attribute("href") == registry.repository(registry.PROJECT.read_text(encoding="utf-8"))
    picture(page, "about")
    page.keyboard.press("Escape")


def test_an_approximate_result_is_said_once(page: "Page") -> None:
    page.evaluate(OPEN, OURS)
    page.evaluate(ADD_LAYOUT, {"pipe": 2, "warmup": 1})
    page.evaluate(SET, ["ParallelSampler", "steps", 4])
    page.evaluate(SET, ["ParallelSampler", "seed", int(time.time())])
    run(page)
    found = toast(page, "This result is approximate")
    assert "By PipeFusion." in found.inner_text()
    picture(page, "approximate")
    assert page.locator(".p-toast-message").filter(has_text="This result is approximate").count() == 1


def test_an_exact_result_says_nothing(page: "Page") -> None:
    page.evaluate(OPEN, OURS)
    page.evaluate(ADD_LAYOUT, {"ulysses": 2})
    page.evaluate(SET, ["ParallelSampler", "steps", 3])
    page.evaluate(SET, ["ParallelSampler", "seed", int(time.time())])
    run(page)
    page.wait_for_function(
        "() => window.app.graph._nodes.find((node) => node.type === 'SaveImage')?.imgs?.[0]?.complete", timeout=PATIENCE
    )
    page.wait_for_timeout(1000)
    assert page.locator(".p-toast-message").all_inner_texts() == []


def pids(server: ComfyServer) -> set[int]:
    try:
        return {rank.pid for rank in query.status(Endpoint(folder=server.runtime), seconds=30).ranks}
    except BackendError:
        return set()


@contextmanager
def killed_ranks(server: ComfyServer, times: int) -> Iterator[None]:
    """Kill a rank of the set that runs, and of those that follow it."""
    ended, over = threading.Event(), list[int]()

    def kill() -> None:
        while len(over) < times and not ended.wait(0.02):
            if new := pids(server) - set(over):
                over.append(max(new))
                with suppress(ProcessLookupError):
                    os.kill(over[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.newest
def test_a_failure_is_said_with_what_to_do(page: "Page", page_server: ComfyServer) -> None:
    page.evaluate(OPEN, NATIVE)
    page.evaluate(SET, ["KSampler", "steps", 3000])
    run(page)
    page.wait_for_function(HAS_TIME, arg="KSampler", timeout=PATIENCE)
    with killed_ranks(page_server, 1):
        recovered = toast(page, "Parallel DiT went on after a problem")
    assert "was killed by SIGKILL" in recovered.inner_text()
    picture(page, "recovered")
    with killed_ranks(page_server, 1000):
        failed = toast(page, "Parallel DiT could not do this")
    assert "SIGKILL" in failed.inner_text()
    assert "Queue the prompt again: the processes start anew." in failed.inner_text()
    picture(page, "failed")
    # The other tests' prompts load anew then, and with all devices: those that were killed as they started were left.
    page.wait_for_function(NOTHING_RUNS, timeout=PATIENCE)
    page_server.client.request("/free", {"unload_models": True, "free_memory": True})
    page.wait_for_timeout(2000)
