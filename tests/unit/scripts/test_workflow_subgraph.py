"""The subgraphs of the example workflows and the blueprint: what is inside, what their nodes show, and their links."""

from typing import Any

import pytest

from scripts import blueprint, workflow_subgraph, workflows
from scripts.workflow_layout import group_of
from scripts.workflow_subgraph import INPUTS, OUTPUTS

NAMES = [name for name in workflows.names() if workflows.needs_download(name)]
GRAPHS = [*NAMES, blueprint.NAME]


def graph_of(name: str) -> dict[str, Any]:
    return blueprint.read() if name == blueprint.NAME else workflows.graph(name)


def parts(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The graph, its subgraph, and the node that stands for it."""
    graph = graph_of(name)
    (subgraph,) = graph["definitions"]["subgraphs"]
    (node,) = (node for node in graph["nodes"] if node["type"] == subgraph["id"])
    return graph, subgraph, node


@pytest.mark.parametrize("name", NAMES)
def test_people_see_models_gpus_prompts_and_results_and_the_rest_is_inside(name: str) -> None:
    graph, subgraph, _ = parts(name)
    seen = {node["type"] for node in graph["nodes"]} - {subgraph["id"], "MarkdownNote"}
    assert {group_of(kind) for kind in seen} <= {"Models", "Several GPUs", "Prompt", "Result"}
    assert [kind for kind in seen if group_of(kind) == "Result" and not kind.startswith("Save")] == []
    inside = {node["type"] for node in subgraph["nodes"]}
    assert not any(group_of(kind) in ("Several GPUs", "Models", "Prompt") for kind in inside)
    assert any("Sampler" in kind for kind in inside)
    assert any("VAEDecode" in kind for kind in inside)


def test_the_included_model_shows_its_sampler() -> None:
    for name in set(workflows.names()) - set(NAMES):
        graph = workflows.graph(name)
        assert "definitions" not in graph
        assert len([node for node in graph["nodes"] if node["type"] in ("KSampler", "ParallelSampler")]) == 1


@pytest.mark.parametrize("name", GRAPHS)
def test_links_and_slots_name_each_other(name: str) -> None:
    graph, subgraph, node = parts(name)
    for side, end in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        assert [slot["name"] for slot in node[side]] == [slot["name"] for slot in subgraph[side]]
        assert len({slot["name"] for slot in subgraph[side]}) == len(subgraph[side])
        for number, slot in enumerate(subgraph[side]):
            ends = ("origin_id", "origin_slot") if side == "inputs" else ("target_id", "target_slot")
            found = [link["id"] for link in subgraph["links"] if [link[each] for each in ends] == [end, number]]
            assert found == slot["linkIds"]
            assert found
    inner = [[link[each] for each in workflow_subgraph.LINK] for link in subgraph["links"]]
    check_links(graph["nodes"], graph["links"])
    check_links(subgraph["nodes"], inner)


@pytest.mark.parametrize("name", sorted(set(workflows.names()) - set(NAMES)))
def test_links_without_a_subgraph_are_at_both_ends(name: str) -> None:
    """ComfyUI 0.8.0 shows a warning of others when it opens them."""
    graph = workflows.graph(name)
    check_links(graph["nodes"], graph["links"])


def check_links(level: list[dict[str, Any]], links: list[list[Any]]) -> None:
    """Check that the nodes of a graph name the links that name them."""
    by_id = {each["id"]: each for each in level}
    assert len({link[0] for link in links}) == len(links)
    for number, source, slot, target, at, kind in links:
        if source in by_id:
            output = by_id[source]["outputs"][slot]
            assert number in output["links"]
            assert output["type"] == kind
        if target in by_id:
            assert by_id[target]["inputs"][at]["link"] == number
    assert {source for _, source, *_ in links} <= by_id.keys() | {INPUTS}
    assert {link[3] for link in links} <= by_id.keys() | {OUTPUTS}


@pytest.mark.parametrize(
    ("name", "value", "kinds"),
    [
        ("Wan 2.2 14B, text to video", "steps", ["KSamplerAdvanced", "KSamplerAdvanced"]),
        ("Flux.2 dev, text to image", "width", ["EmptyFlux2LatentImage", "Flux2Scheduler"]),
        ("LTX-2.3, text to video with sound", "length", ["EmptyLTXVLatentVideo", "LTXVEmptyLatentAudio"]),
        (blueprint.NAME, "devices", ["ParallelModel", "ParallelVAE"]),
    ],
)
def test_a_value_that_several_nodes_need_is_there_once(name: str, value: str, kinds: list[str]) -> None:
    _, subgraph, node = parts(name)
    assert [slot["name"] for slot in node["inputs"]].count(value) == 1
    (slot,) = (slot for slot in subgraph["inputs"] if slot["name"] == value)
    targets = [link["target_id"] for link in subgraph["links"] if link["id"] in slot["linkIds"]]
    assert [each["type"] for each in subgraph["nodes"] if each["id"] in targets] == kinds


def test_a_value_that_differs_between_nodes_is_refused() -> None:
    node = {
        "id": 1,
        "type": "A",
        "outputs": [],
        "inputs": [{"name": "steps", "type": "INT", "widget": {}, "link": None}],
    }
    nodes = [node | {"widgets_values": [8]}, node | {"id": 2, "widgets_values": [9]}]
    with pytest.raises(ValueError, match=r"steps is one value on the page, and nodes have \[8, 9\]"):
        workflow_subgraph.fold({"nodes": nodes, "links": []}, 3, {1, 2})


def test_the_blueprint_is_one_node_with_a_description_and_plain_letters() -> None:
    graph, subgraph, node = parts(blueprint.NAME)
    assert graph["nodes"] == [node]
    assert subgraph["name"] == blueprint.NAME
    assert graph["extra"]["BlueprintDescription"] == subgraph["description"] == blueprint.DESCRIPTION
    assert blueprint.FILE.read_bytes().isascii()  # ComfyUI 0.8.0 reads it in the encoding of the machine
