"""What a user does: open an example workflow, press Run, see the image; put the blueprint into a workflow."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts import blueprint, comfy_paths, workflows
from scripts.comfy_api import Prompt
from scripts.comfy_server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


@pytest.fixture
def page(one_page: "Page") -> "Page":
    return one_page  # each test opens a workflow of its own


def queued(page: "Page") -> Queued:
    """The prompt that the page would queue."""
    prompt: dict[str, dict[str, Any]] = page.evaluate(PROMPT)
    return {key: (node["class_type"], node["inputs"]) for key, node in prompt.items()}


MISSING = """() => {
    const levels = [window.app.graph, ...(window.app.graph.subgraphs?.values() ?? [])]
    const nodes = levels.flatMap((level) => level.nodes ?? level._nodes)
    const unknown = (node) => !(node.type in window.LiteGraph.registered_node_types)
    return [...new Set(nodes.filter((node) => !node.isSubgraphNode?.() && unknown(node)).map((node) => node.type))]
}"""
"""The classes that the page lacks, at all levels. It has a note's itself. A file that is missing is no such error."""


def known(prompt: Prompt, info: dict[str, Any]) -> Queued:
    """A prompt with defaults, without inputs that this version of a node lacks."""
    return {
        key: (node["class_type"], {name: value for name, value in node["inputs"].items() if has(node, name, info)})
        for key, node in workflows.with_options(prompt, info).items()
    }


def has(node: dict[str, Any], name: str, info: dict[str, Any]) -> bool:
    return name.partition(".")[0] in workflows.declared_inputs(info[node["class_type"]])


@pytest.mark.parametrize("name", workflows.names())
@pytest.mark.daily(3)
def test_a_workflow_opens_with_no_missing_node_and_queues_the_prompt_of_the_api_format(
    page: "Page", page_server: ComfyServer, comfyui_path: Path, name: str
) -> None:
    info = page_server.client.object_info()
    page.evaluate(OPEN, name)
    missing = set(page.evaluate(MISSING))
    assert missing == {node["class_type"] for node in workflows.api(name).values()} - info.keys()
    assert not missing or workflows.needed_release(name) > comfy_paths.release(comfyui_path)
    if not missing:
        sent: Prompt = page.evaluate(PROMPT)
        assert known(workflows.flat(sent), info) == known(workflows.api(name), info)


def test_a_missing_node_is_found_inside_of_a_subgraph(page: "Page") -> None:
    graph = workflows.graph("Z-Image turbo, text to image")
    inside = graph["definitions"]["subgraphs"][0]["nodes"]
    next(node for node in inside if node["type"] == "KSampler")["type"] = "NoSuchSampler"
    page.evaluate("async (graph) => { await window.app.loadGraphData(graph, true, true, null) }", graph)
    assert page.evaluate(MISSING) == ["NoSuchSampler"]


SET = """([title, name, value]) => {
    const node = window.app.graph._nodes.find((node) => node.title === title)
    const widget = node.widgets.find((widget) => widget.name === name)
    widget.value = value
    widget.callback?.(value)
}"""


def test_a_value_of_the_subgraphs_node_reaches_all_nodes_inside(page: "Page") -> None:
    page.evaluate(OPEN, "Wan 2.2 14B, text to video")
    page.evaluate(SET, ["Sample and decode", "steps", 8])
    page.evaluate(SET, ["Sample and decode", "width", 832])
    sent = workflows.flat(page.evaluate(PROMPT))
    steps = [node["inputs"]["steps"] for node in sent.values() if node["class_type"] == "KSamplerAdvanced"]
    assert steps == [8, 8]
    assert [node["inputs"]["width"] for node in sent.values() if "width" in node["inputs"]] == [832]


@pytest.mark.newest
def test_run_shows_the_finished_image(page: "Page") -> None:
    name = "Included model, text to image (native nodes)"
    page.evaluate(OPEN, name)
    assert page.evaluate(IMAGE_SIZE) is None
    page.get_by_test_id("queue-button").first.click()
    page.wait_for_function(IMAGE_SIZE, timeout=300_000)
    size = workflows.api(name)["4"]["inputs"]
    assert page.evaluate(IMAGE_SIZE) == [size["width"], size["height"]]


PARALLEL_MODEL = "Z-Image turbo, text to image"
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


@pytest.mark.newest
@pytest.mark.parametrize("mode", [BYPASS, MUTE])
def test_bypassed_nodes_pass_on_what_they_get_and_muted_ones_nothing(page: "Page", mode: int) -> None:
    page.evaluate(OPEN, PARALLEL_MODEL)
    before = queued(page)
    page.evaluate(SET_MODE, [list(PARALLEL), mode])
    ours = {key: inputs[PARALLEL[kind]] for key, (kind, inputs) in before.items() if kind in PARALLEL}
    assert len(ours) == 2
    assert queued(page) == relinked(before, ours if mode == BYPASS else dict.fromkeys(ours))


@pytest.mark.newest
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


LISTED = """(name) => {
    const store = document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia._s.get("subgraph")
    return store?.subgraphBlueprints.some((each) => each.display_name === name)
}"""
ADD = """(name) => {
    const store = document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia._s.get("subgraph")
    const listed = store.subgraphBlueprints.find((each) => each.display_name === name)
    const { nodes, definitions } = store.getBlueprint(listed.name)
    const items = { nodes, subgraphs: definitions.subgraphs }
    const [node] = window.app.canvas._deserializeItems(items, { position: [0, 0] }).nodes.values()
    const graph = window.app.graph
    for (const [kind, type] of [["ParallelModel", "MODEL"], ["ParallelVAE", "VAE"]]) {
        const old = graph._nodes.find((each) => each.type === kind)
        const { origin_id, origin_slot } = graph.links.get(old.inputs[0].link)
        const ends = old.outputs[0].links.map((id) => graph.links.get(id))
        const targets = ends.map(({ target_id, target_slot }) => [target_id, target_slot])
        graph.getNodeById(origin_id).connect(origin_slot, node, node.inputs.findIndex((slot) => slot.type === type))
        graph.remove(old)
        const output = node.outputs.findIndex((slot) => slot.type === type)
        for (const [id, slot] of targets) node.connect(output, graph.getNodeById(id), slot)
    }
    node.title = "Blueprint"
    return listed.description
}"""
"""Adds a blueprint as the page does when it is chosen in the node library, in the place of our two nodes."""
SET_NODE = """([title, mode]) => { window.app.graph._nodes.find((node) => node.title === title).mode = mode }"""


def test_the_blueprint_takes_the_place_of_our_nodes_and_can_be_bypassed(page: "Page") -> None:
    page.evaluate(OPEN, PARALLEL_MODEL)
    before = queued(page)
    page.wait_for_function(LISTED, arg=blueprint.NAME, timeout=60_000)
    assert page.evaluate(ADD, blueprint.NAME) == blueprint.DESCRIPTION
    assert page.evaluate(MISSING) == []
    page.evaluate(SET, ["Blueprint", "devices", "0,1"])
    after = queued(page)
    ours = {kind: key for key, (kind, _) in after.items() if kind in PARALLEL}
    replaced = {key: ours[kind] for key, (kind, _) in before.items() if kind in PARALLEL}
    moved = relinked(before, {key: [new, 0] for key, new in replaced.items()})
    for key, new in replaced.items():
        kind, inputs = before[key]
        moved[new] = (kind, inputs | {"devices": "0,1"})
    assert ours.keys() == PARALLEL.keys()
    assert known_values(after) == known_values(moved)
    page.evaluate(SET_NODE, ["Blueprint", BYPASS])
    links = {key: inputs[PARALLEL[kind]] for key, (kind, inputs) in before.items() if kind in PARALLEL}
    assert executed(queued(page)) == relinked(before, links)


def executed(prompt: Queued) -> Queued:
    """The part of a prompt that ComfyUI executes: 0.8.0's page also queues what is in a bypassed subgraph."""
    wanted = [key for key, (kind, _) in prompt.items() if kind.startswith("Save")]
    for key in wanted:
        links = [value[0] for value in prompt[key][1].values() if is_link(value)]
        wanted += [link for link in links if link not in wanted]
    return {key: prompt[key] for key in wanted}


def known_values(prompt: Queued) -> Queued:
    """A prompt without what our nodes have by default: the template's say less than the blueprint's."""
    defaults = {"attention": "auto", "compile": "off"}
    return {
        key: (kind, {name: value for name, value in inputs.items() if defaults.get(name) != value})
        for key, (kind, inputs) in prompt.items()
    }
