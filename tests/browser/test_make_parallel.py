"""Make parallel in the page: official templates become parallel, and undo brings back every byte."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from scripts.comfy_server import ComfyServer
from scripts.install import templates_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

MAKE, UNDO = "ParallelDiT.MakeParallel", "Comfy.Undo"
RUN = """async (id) => { await window.app.extensionManager.command.execute(id) }"""
OPEN = "async ([name, graph]) => { await window.app.loadGraphData(graph, true, true, name) }"
BYTES = "() => JSON.stringify((window.app.rootGraph ?? window.app.graph).serialize())"
OURS = ("ParallelModel", "ParallelVAE")

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh"),
]


def count(graph: str) -> int:
    content = json.loads(graph)
    levels = [content, *(content.get("definitions") or {}).get("subgraphs", [])]
    return sum(node["type"] in OURS for level in levels for node in level["nodes"])


def settled(page: "Page") -> str:
    """The graph's bytes, once the page changes them no more."""
    before, after = "", page.evaluate(BYTES)
    while before != after:
        page.wait_for_timeout(300)
        before, after = after, page.evaluate(BYTES)
    return str(after)


def candidates() -> list[tuple[str, Any]]:
    found = []
    for path in sorted(templates_folder().glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(content)
        if "nodes" in content and ('"UNETLoader"' in text or '"CheckpointLoaderSimple"' in text):
            found.append((path.stem, content))
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wanted", [5, pytest.param(30, marks=pytest.mark.long)])
def test_templates_become_parallel_and_undo_restores_every_byte(
    wanted: int, page: "Page", page_server: ComfyServer
) -> None:
    all_of_them = candidates()
    chosen = all_of_them[:: len(all_of_them) * 6 // (wanted * 7)]  # some have nothing to make parallel
    changed = 0
    for name, graph in chosen:
        page.evaluate(OPEN, [name, graph])
        # The page counts a subgraph's nodes anew when it opens what it has written itself, undo or not.
        page.evaluate(OPEN, [name, json.loads(settled(page))])
        before = settled(page)
        page.evaluate(RUN, MAKE)
        after = settled(page)
        page.evaluate(RUN, UNDO)
        undone = settled(page)
        assert undone == before, name
        changed += count(after) > count(before)
    assert changed >= wanted


def test_the_command_is_in_palette_menu_and_panel_and_says_what_stays(page: "Page") -> None:
    name, graph = next((name, graph) for name, graph in candidates() if "DualCLIPLoader" in json.dumps(graph))
    page.evaluate(OPEN, [name, graph])
    settled(page)
    assert page.evaluate("(id) => window.app.extensionManager.command.commands.some((each) => each.id === id)", MAKE)
    page.evaluate(RUN, MAKE)
    page.get_by_text("The workflow is parallel.").first.wait_for()
    page.get_by_text("text encoders run once a prompt").first.wait_for()
    page.evaluate(RUN, MAKE)
    page.get_by_text("There is nothing to make parallel").first.wait_for()
    menu = page.evaluate(
        "() => window.app.canvas.getCanvasMenuOptions?.().map((each) => each?.content).filter(Boolean) ?? []"
    )
    assert "Make parallel" in menu


def test_the_shortcut_makes_it_parallel(page: "Page") -> None:
    name, graph = candidates()[3]
    page.evaluate(OPEN, [name, graph])
    before = settled(page)
    page.locator("#graph-canvas").focus()
    page.keyboard.press("Alt+Shift+P")
    page.get_by_text("The workflow is parallel.").first.wait_for()
    assert count(settled(page)) > count(before)
