"""The graphs of the example workflows: groups that hold their nodes, nothing over anything, and a note of the files.

What is true of the page is true inside of the subgraph.
"""

from itertools import combinations
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from scripts import workflow_layout, workflow_note, workflow_thumbnail, workflows

NAMES = workflows.names()
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def box(left: float, top: float, width: float, height: float) -> Box:
    return left, top, left + width, top + height


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def box_of(node: dict[str, Any]) -> Box:
    """A node with its title."""
    (left, top), (width, height) = node["pos"], node["size"]
    return box(left, top - 30, width, height + 30)


def levels(name: str) -> list[dict[str, Any]]:
    """The page, and its subgraph if it has one."""
    graph = workflows.graph(name)
    return [graph, *graph.get("definitions", {}).get("subgraphs", [])]


LEVELS = [(name, level) for name in NAMES for level in range(len(levels(name)))]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_nothing_lies_over_anything(name: str, level: int) -> None:
    graph = levels(name)[level]
    for one, other in combinations(graph["nodes"], 2):
        assert not overlap(box_of(one), box_of(other)), (one["type"], other["type"])
    for one, other in combinations(graph["groups"], 2):
        assert not overlap(box(*one["bounding"]), box(*other["bounding"])), (one["title"], other["title"])


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_each_node_is_in_its_group_and_the_note_in_none(name: str, level: int) -> None:
    graph = levels(name)[level]
    groups = {group["title"]: box(*group["bounding"]) for group in graph["groups"]}
    held = set()
    for node in graph["nodes"]:
        at = {title for title, place in groups.items() if overlap(box_of(node), place)}
        if node["type"] == workflow_note.NOTE:
            assert not at
            continue
        assert at == {workflow_layout.group_of(node["type"])}, node["type"]
        left, top, right, bottom = box_of(node)
        (place,) = (groups[title] for title in at)
        assert place[0] <= left
        assert place[1] <= top
        assert right <= place[2]
        assert bottom <= place[3]
        held |= at
    assert held == groups.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_note_names_every_file_with_its_folder_and_address(name: str) -> None:
    (note,) = (node for node in workflows.graph(name)["nodes"] if node["type"] == workflow_note.NOTE)
    (text,) = note["widgets_values"]
    assert text.startswith(f"# {name}\n")
    needed = workflows.needed_comfyui(name)
    assert (f"Needs ComfyUI {needed} or newer." in text) == ("Needs ComfyUI" in text) == bool(needed)
    for file in workflows.needed_files(name):
        begin = text.index(f"`ComfyUI/models/{file['directory']}`")
        assert f"- [{file['name']}]({file['url']})" in text[begin:].split("In `", 2)[0]
    for folder in workflows.needed_folders(name):
        assert workflow_note.download(folder) in text
    for subgraph in levels(name)[1:]:
        numbers = [slot["name"] for slot in subgraph["inputs"] if slot["type"] in ("INT", "FLOAT")]
        shown = ", ".join(f"`{number}`" for number in numbers)
        assert f"On *{subgraph['name']}*: {shown}." in text
    assert ("Nothing to download" in text) != workflows.needs_download(name)


def test_our_nodes_are_where_a_person_looks_for_gpus() -> None:
    groups = {"ParallelModel": "Several GPUs", "ParallelVAE": "Several GPUs", "ParallelLoader": "Several GPUs"}
    for kind, title in (groups | {"ParallelSampler": "Sampling", "UNETLoader": "Models", "ModelSamplingSD3": "Models",
                                  "LoadImage": "Prompt", "VAEDecode": "Result"}).items():  # fmt: skip
        assert workflow_layout.group_of(kind) == title


def test_numbers_of_nodes_are_unique() -> None:
    for name in NAMES:
        ids = [node["id"] for level in levels(name) for node in level["nodes"]]
        assert len(ids) == len(set(ids))
        assert max(ids) == workflows.graph(name)["last_node_id"]


@pytest.mark.parametrize("name", [name for name in NAMES if workflows.needs_download(name)])
def test_the_thumbnail_is_drawn_from_the_graph(name: str) -> None:
    drawn = workflow_thumbnail.draw(name, workflows.graph(name))
    stored = Image.open(workflows.FOLDER / f"{name}.jpg").convert("RGB")
    assert stored.size == drawn.size
    difference = ImageChops.difference(stored, drawn).convert("L")
    assert ImageStat.Stat(difference).mean[0] < 5, "run python -m scripts.generate"
