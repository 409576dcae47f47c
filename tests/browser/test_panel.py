"""The panel with a real backend: its true state, its buttons, its settings, and what it costs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from parallel_backend.client import query
from parallel_backend.errors import BackendError, BackendUnavailable
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.status import Status
from scripts import workflows
from scripts.comfy_paths import ROOT
from scripts.comfy_server import ComfyServer
from tests.browser.test_panel_looks import open_panel

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE = 180.0
NAME = "Included model, text to image (native nodes)"
STATE = ".pdit-panel[data-state={}]"
PIDS = """() => (window.pditShown?.status?.ranks ?? []).map((rank) => rank.pid)"""
STEPS = """(prompt) => {
    const steps = window.pditShown?.steps;
    return steps?.origin?.prompt === prompt && steps.seconds.length > 3;
}"""
LISTEN = (
    """() => window.app.api.addEventListener("parallel_dit.status", ({ detail }) => { window.pditShown = detail })"""
)
ID = "ParallelDiT.Backend.IdleTimeout"
GET = "(id) => window.app.extensionManager.setting.get(id)"
SET = "([id, value]) => window.app.extensionManager.setting.set(id, value)"
SHARE = 0.01
"""Of one core: what the open panel may cost in ComfyUI's and the backend's processes together."""


def status(server: ComfyServer) -> Status | None:
    try:
        return query.status(Endpoint(folder=server.runtime), seconds=60)
    except BackendUnavailable:
        return None


def idle_timeout(server: ComfyServer) -> float | None:
    found = status(server)
    return found.idle_timeout if found else None


def by_command(server: ComfyServer) -> Any:
    command = [sys.executable, "-m", "parallel_backend", "status", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=server.environment(), capture_output=True, check=True, timeout=90)
    return json.loads(done.stdout)


def until(condition: Callable[[], Any], page: "Page") -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        page.wait_for_timeout(200)
    return found


@pytest.fixture
def panel(page: "Page", page_server: ComfyServer) -> "Iterator[Page]":
    """The open panel of a page whose backend is off at first and at the end."""
    stop(page_server)
    page.evaluate(LISTEN)
    open_panel(page)
    page.locator(STATE.format("off")).wait_for(timeout=1000 * PATIENCE)
    yield page
    page_server.client.interrupt()
    stop(page_server)


def stop(server: ComfyServer) -> None:
    try:
        query.stop(Endpoint(folder=server.runtime), seconds=60)
    except BackendError:
        assert status(server) is None


def press(page: "Page", name: str) -> None:
    page.locator(f"[data-action={name}]").click()


def sample(page: "Page", server: ComfyServer) -> str:
    """Queue a long prompt from the page, and wait until the panel shows its steps."""
    graph = workflows.api(NAME)
    for node in graph.values():
        if "steps" in node["inputs"]:
            node["inputs"] |= {"steps": 4000, "seed": int(time.time())}
    client_id = page.evaluate("() => window.app.api.clientId")
    body = {"prompt": workflows.with_options(graph, server.client.object_info()), "client_id": client_id}
    prompt_id: str = json.loads(server.client.request("/prompt", body))["prompt_id"]
    page.wait_for_function(STEPS, arg=prompt_id, timeout=1000 * PATIENCE)
    return prompt_id


@pytest.mark.newest
def test_the_true_state_while_sampling_and_after_a_rank_was_killed(panel: "Page", page_server: ComfyServer) -> None:
    prompt_id = sample(panel, page_server)
    panel.locator(STATE.format("busy")).wait_for()
    true = by_command(page_server)
    assert panel.evaluate(PIDS) == [rank["pid"] for rank in true["ranks"]]
    shown = panel.evaluate("() => window.pditShown")
    assert shown["status"]["work"]["origin"] == true["work"]["origin"]
    assert true["work"]["origin"]["prompt"] == prompt_id
    assert panel.locator(".pdit-device").count() == len(true["ranks"]) == 2
    total = true["ranks"][0]["device_total"] / 2**30
    for words in ("CPU process 0", "CPU process 1", f"of {total:.1f} GiB", "of 4000 steps", "s a step", "float32"):
        panel.locator(".pdit-panel").get_by_text(words).first.wait_for()
    until(lambda: panel.locator(".pdit-history").count() == 1, panel)
    before = true["generation"]
    os.kill(true["ranks"][1]["pid"], signal.SIGKILL)
    until(lambda: "Last recovery" in panel.locator(".pdit-panel").inner_text(), panel)
    until(lambda: (now := status(page_server)) and now.generation > before and len(now.ranks) == 2, panel)
    until(lambda: panel.evaluate(PIDS) == [rank["pid"] for rank in by_command(page_server)["ranks"]], panel)
    assert "was killed by SIGKILL" in panel.locator(".pdit-trouble").inner_text()


@pytest.mark.newest
def test_cancel_unload_and_stop_free_memory(panel: "Page", page_server: ComfyServer) -> None:
    sample(panel, page_server)
    press(panel, "cancel")
    panel.locator(STATE.format("idle")).wait_for(timeout=1000 * PATIENCE)
    # Older versions keep no model of an interrupted prompt.
    page_server.client.run(workflows.api(NAME), deadline=PATIENCE)
    panel.locator(STATE.format("idle")).wait_for(timeout=1000 * PATIENCE)
    now = until(lambda: (now := status(page_server)) and all(rank.models for rank in now.ranks) and now, panel)
    until(lambda: "transformer" in panel.locator(".pdit-panel").inner_text(), panel)
    press(panel, "unload")
    until(lambda: (now := status(page_server)) and not any(rank.models for rank in now.ranks), panel)
    until(lambda: "None is loaded." in panel.locator(".pdit-panel").inner_text(), panel)
    pids = [rank.pid for rank in now.ranks]
    held = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    assert held > 100 << 20
    with panel.expect_response("**/parallel_dit/stop", timeout=1000 * PATIENCE):  # the processes are gone then
        press(panel, "stop")
    panel.locator(STATE.format("off")).wait_for(timeout=1000 * PATIENCE)
    assert not any(psutil.pid_exists(pid) for pid in pids)  # so that all of it is free
    press(panel, "start")
    panel.locator(STATE.format("idle")).wait_for(timeout=1000 * PATIENCE)
    assert status(page_server) is not None


@pytest.mark.newest
def test_settings_survive_a_reload_and_reach_the_backend(page: "Page", page_server: ComfyServer) -> None:
    stop(page_server)
    page.wait_for_function("(id) => window.app.extensionManager.setting.get(id) === 600", arg=ID)
    page.wait_for_timeout(2000)
    page.evaluate(SET, [ID, 900])
    file = page_server.home / "settings.json"
    until(lambda: file.exists() and json.loads(file.read_text()) == {"PARALLEL_DIT_IDLE_TIMEOUT": "900"}, page)
    page.reload()
    page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=1000 * PATIENCE)
    page.wait_for_function("(id) => window.app.extensionManager.setting.get(id) === 900", arg=ID)
    open_panel(page)
    press(page, "start")
    page.locator(STATE.format("idle")).wait_for(timeout=1000 * PATIENCE)
    until(lambda: idle_timeout(page_server) == 900, page)
    page.wait_for_timeout(1000)
    page.evaluate(SET, [ID, 700])  # reaches the backend that runs
    until(lambda: idle_timeout(page_server) == 700, page)
    page.evaluate(SET, ["ParallelDiT.Backend.Devices", "0;rm"])
    page.get_by_text("write all, or numbers such as 0,1").wait_for()
    until(lambda: page.evaluate(GET, "ParallelDiT.Backend.Devices") == "all", page)
    page.evaluate(SET, [ID, 600])
    until(lambda: json.loads(file.read_text()) == {}, page)
    stop(page_server)


def cpu_time(running: list[psutil.Process]) -> float:
    times = [each.cpu_times() for each in running]
    return sum(each.user + each.system for each in times)


@pytest.mark.newest
@pytest.mark.long
def test_the_open_panel_costs_little_and_the_closed_one_asks_nothing(panel: "Page", page_server: ComfyServer) -> None:
    press(panel, "start")
    panel.locator(STATE.format("idle")).wait_for(timeout=1000 * PATIENCE)

    panel.wait_for_timeout(5000)
    begun = status(page_server)
    assert begun is not None
    running = [psutil.Process(pid) for pid in (page_server.pid, begun.pid)]

    def spent(seconds: int = 20) -> float:
        before = cpu_time(running)
        panel.wait_for_timeout(1000 * seconds)
        return (cpu_time(running) - before) / seconds

    opened = spent()
    requests = list[str]()
    panel.locator(".parallel-dit-tab-button").click()
    panel.wait_for_timeout(3000)
    panel.on("request", lambda request: requests.append(request.url))
    panel.evaluate("() => { window.pditShown = null }")
    closed = spent()
    assert opened - closed < SHARE
    assert [url for url in requests if "parallel_dit" in url] == []
    assert panel.evaluate("() => window.pditShown") is None


def test_no_request_leaves_for_another_origin(page_server: ComfyServer, browser: Any) -> None:
    page, urls = browser.new_page(), list[str]()
    page.on("request", lambda request: urls.append(request.url))
    page.goto(page_server.client.url, wait_until="domcontentloaded")
    page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=1000 * PATIENCE)
    open_panel(page)
    page.locator(".pdit-panel[data-state]").wait_for()
    ours = [url for url in urls if "parallel" in url.lower()]
    assert any(url.endswith("/panel/panel.js") for url in ours)
    assert all(url.startswith(page_server.client.url + "/") for url in ours)
    page.close()


@pytest.mark.newest
def test_the_first_notice_is_shown_until_it_is_closed(page_server: ComfyServer, browser: Any) -> None:
    page_server.client.request("/settings/ParallelDiT.Met", False)
    page = browser.new_page()

    def load() -> None:
        page.goto(page_server.client.url, wait_until="domcontentloaded")
        page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=1000 * PATIENCE)

    load()
    notice = page.locator(".pdit-contact")
    notice.wait_for(timeout=1000 * PATIENCE)
    assert "No GPU was found. 2 processes on the CPU" in notice.inner_text()
    notice.get_by_role("button", name="Close").click()
    assert notice.count() == 0
    page.wait_for_timeout(1000)
    load()
    page.wait_for_timeout(5000)
    assert notice.count() == 0
    page.close()
