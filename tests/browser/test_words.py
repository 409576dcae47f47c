"""Nodes that offer what there is: the choice of devices, and what Parallel Layout shows first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from scripts.comfy_server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

ADD = """(type) => {
    const node = window.LiteGraph.createNode(type)
    node.pos = [500, 300]
    window.app.graph.add(node)
    return node.id
}"""
DEVICES = "(window.app.graph.getNodeById(id).widgets.find((widget) => widget.name === 'devices'))"
OFFERED = f"(id) => {{ const {{ options }} = {DEVICES}; return [...options.values].map(options.getOptionLabel) }}"
VALUE = f"(id) => {DEVICES}.value"
SET = f"([id, value]) => {{ const widget = {DEVICES}; widget.value = value; widget.callback?.(value) }}"
CPU = [
    "all (2 CPU processes)", "0 (one CPU process)", "0,1 (2 CPU processes)", "0,1,2 (3 CPU processes)",
    "0,1,2,3 (4 CPU processes)", "Other …",
]  # fmt: skip
ORDER = "(id) => window.app.graph.getNodeById(id).widgets.map((widget) => widget.name)"
RELOAD = """async () => {
    await window.app.loadGraphData(JSON.parse(JSON.stringify(window.app.graph.serialize())))
}"""
PROMPT = "async () => (await window.app.graphToPrompt()).output"
RENDERERS = {"Nodes 2.0": True, "classic": False}


@pytest.fixture(params=list(RENDERERS.values()), ids=list(RENDERERS))
def empty(request: pytest.FixtureRequest, one_page: "Page") -> "Iterator[Page]":
    """A page with an empty graph, in both ways that ComfyUI draws nodes."""
    page = one_page
    page.evaluate("(on) => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", request.param)
    # Another graph: the page keeps values of widgets by graph and node, and a cleared graph numbers its nodes again.
    page.evaluate("async () => await window.app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    yield page
    page.evaluate("() => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")


def offers(page: "Page", node: Any) -> list[str]:
    page.wait_for_function(f"(id) => {DEVICES}.options.values.length > 3", arg=node)
    labels: list[str] = page.evaluate(OFFERED, node)
    return labels


@pytest.mark.parametrize("kind", ["ParallelLoader", "ParallelModel", "ParallelVAE"])
@pytest.mark.daily(4)
def test_devices_offers_what_there_is_in_its_old_place(empty: "Page", page_server: ComfyServer, kind: str) -> None:
    node = empty.evaluate(ADD, kind)
    assert offers(empty, node) == CPU
    assert empty.evaluate(VALUE, node) == "all"
    inputs = page_server.client.object_info()[kind]["input"]
    spec = {**inputs["required"], **inputs.get("optional", {})}
    assert spec["devices"][0] == "STRING"  # programs may send any text
    widgets = [name for name, each in spec.items() if isinstance(each[0], list) or each[0] in ("STRING", "COMBO")]
    assert empty.evaluate(ORDER, node) == widgets  # saved graphs hold values by position


def test_a_saved_value_stays_and_is_queued(empty: "Page") -> None:
    node = empty.evaluate(ADD, "ParallelModel")
    offers(empty, node)
    for value in ("cuda:0,cuda:1", "0,0@second", "0,1,2"):
        empty.evaluate(SET, [node, value])
        empty.evaluate(RELOAD)
        assert empty.evaluate(VALUE, node) == value
        assert empty.evaluate(PROMPT)[str(node)]["inputs"]["devices"] == value
        known = value in [each.split(" ")[0] for each in CPU]
        assert offers(empty, node) == (CPU if known else [value, *CPU])


def test_other_asks_for_a_list(empty: "Page") -> None:
    node = empty.evaluate(ADD, "ParallelModel")
    offers(empty, node)
    for answer in ("3,1", None):
        empty.evaluate(SET, [node, "…"])
        dialog = empty.get_by_role("dialog")
        dialog.get_by_text("0@name is GPU 0 of the machine with that name").wait_for()
        assert empty.evaluate(VALUE, node) == ("all" if answer else "3,1")
        if answer:
            dialog.locator("input").fill(answer)
            empty.keyboard.press("Enter")
        else:
            empty.keyboard.press("Escape")
        dialog.wait_for(state="detached")
        assert empty.evaluate(VALUE, node) == "3,1"


def test_devices_take_a_link(empty: "Page", page_server: ComfyServer) -> None:
    model, text = empty.evaluate(ADD, "ParallelModel"), empty.evaluate(ADD, "PrimitiveString")
    connect = """([from, to]) => {
        const [source, target] = [from, to].map((id) => window.app.graph.getNodeById(id))
        source.connect(0, target, target.inputs.findIndex((input) => input.name === "devices"))
    }"""
    empty.evaluate(connect, [text, model])
    empty.evaluate(RELOAD)
    assert empty.evaluate(PROMPT)[str(model)]["inputs"]["devices"] == [str(text), 0]


CHANGE = """([id, name, value]) => {
    const widget = window.app.graph.getNodeById(id).widgets.find((each) => each.name === name)
    widget.value = value
    widget.callback(value)
}"""
INPUTS = "async (id) => (await window.app.graphToPrompt()).output[id].inputs"
SHOWN = "(id) => Boolean(window.app.graph.getNodeById(id).showAdvanced)"
ONES = dict.fromkeys(("data", "cfg", "pipe", "ring", "ulysses", "dsp", "tensor", "warmup"), 1)
USUAL: dict[str, Any] = {**ONES, "shard_weights": False, "stale": "off", "patches": 0, "balance": ""}


def test_the_layout_node_shows_its_mode_first(empty: "Page", page_server: ComfyServer) -> None:
    inputs = page_server.client.object_info()["ParallelLayout"]["input"]
    spec = {**inputs.get("required", {}), **inputs["optional"]}
    shown = [name for name, each in spec.items() if not each[1].get("advanced")]
    assert shown == ["mode"] == list(spec)[:1]
    assert all(each[1]["tooltip"].endswith(".") for each in spec.values())
    node = empty.evaluate(ADD, "ParallelLayout")
    assert empty.evaluate(ORDER, node) == list(spec)
    assert empty.evaluate(INPUTS, node) == {**USUAL, "mode": "auto"}
    assert empty.evaluate(SHOWN, node) is False


def test_a_changed_degree_and_the_mode_choose_each_other(empty: "Page") -> None:
    node = empty.evaluate(ADD, "ParallelLayout")
    empty.evaluate(CHANGE, [node, "pipe", 1])  # which it is
    assert empty.evaluate(INPUTS, node)["mode"] == "auto"
    empty.evaluate(CHANGE, [node, "pipe", 2])
    for _ in range(2):
        assert empty.evaluate(INPUTS, node) == {**USUAL, "mode": "degrees", "pipe": 2}
        assert empty.evaluate(SHOWN, node) is True
        empty.evaluate(RELOAD)
    empty.evaluate(CHANGE, [node, "mode", "fastest"])
    assert empty.evaluate(INPUTS, node) == {**USUAL, "mode": "fastest"}
    assert empty.evaluate(SHOWN, node) is False


def test_a_linked_degree_chooses_degrees(empty: "Page") -> None:
    node, number = empty.evaluate(ADD, "ParallelLayout"), empty.evaluate(ADD, "PrimitiveInt")
    connect = """([from, to]) => {
        const [source, target] = [from, to].map((id) => window.app.graph.getNodeById(id))
        source.connect(0, target, target.inputs.findIndex((input) => input.name === "cfg"))
    }"""
    empty.evaluate(connect, [number, node])
    assert empty.evaluate(INPUTS, node) == {**USUAL, "mode": "degrees", "cfg": [str(number), 0]}


@pytest.mark.parametrize("mode", ["fastest", "degrees"])
@pytest.mark.daily(2)
def test_a_prompt_of_the_api_keeps_its_mode_in_the_page(empty: "Page", mode: str) -> None:
    values = USUAL | {"mode": mode} | ({"cfg": 2} if mode == "degrees" else {})
    prompt = {"7": {"class_type": "ParallelLayout", "inputs": {"mode": mode, **values}}}
    empty.evaluate("(prompt) => window.app.loadApiJson(prompt, 'prompt')", prompt)
    assert empty.evaluate(INPUTS, "7") == values


def test_a_layout_saved_without_a_mode_keeps_its_degrees(empty: "Page") -> None:
    node = empty.evaluate(ADD, "ParallelLayout")
    load = """async ([id, values]) => {
        const graph = window.app.graph.serialize()
        graph.nodes.find((node) => String(node.id) === String(id)).widgets_values = values
        await window.app.loadGraphData(graph)
    }"""
    empty.evaluate(load, [node, [1, 2, 1, 1, 3, 1, True, "off", 0, 1, "", 1]])
    changed = {"mode": "degrees", "cfg": 2, "ulysses": 3, "shard_weights": True}
    assert empty.evaluate(INPUTS, node) == USUAL | changed
    assert empty.evaluate(SHOWN, node) is True
