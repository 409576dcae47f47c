"""All of ComfyUI's official templates made parallel: consistent graphs that bypassing makes the original ones again."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_backend.make_parallel.level import levels
from parallel_backend.make_parallel.loaders import LOADERS
from parallel_backend.make_parallel.report import NODES
from parallel_backend.make_parallel.workflow import make_parallel
from scripts.install import templates_folder

pytestmark = pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed")
OURS = frozenset(NODES.values())


def templates() -> list[Path]:
    paths = sorted(templates_folder().glob("*.json"))
    return [path for path in paths if "nodes" in json.loads(path.read_text(encoding="utf-8"))]


def links(content: dict[str, Any]) -> Iterator[tuple[int, Any, int, Any, int]]:
    for link in content["links"]:
        if isinstance(link, dict):
            link = [link[name] for name in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
        yield tuple(link[:5])


def wiring(content: dict[str, Any]) -> set[tuple[Any, ...]]:
    """What each input gets, where our nodes pass on what they get."""
    ends = {number: (origin, output) for number, origin, output, _, _ in links(content)}
    passed = {node["id"]: ends[node["inputs"][0]["link"]] for node in content["nodes"] if node["type"] in OURS}
    return {
        (number, *passed.get(origin, (origin, output)), target, at)
        for number, origin, output, target, at in links(content)
        if target not in passed
    }


def check_consistent(content: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in content["nodes"]}
    assert len(nodes) == len(content["nodes"])
    numbers = [number for number, *_ in links(content)]
    assert len(numbers) == len(set(numbers))
    for number, origin, output, target, at in links(content):
        if nodes.get(origin, {}).get("type") in OURS:
            assert number in nodes[origin]["outputs"][output]["links"]
        if nodes.get(target, {}).get("type") in OURS:
            assert nodes[target]["inputs"][at]["link"] == number


def test_every_template_becomes_a_consistent_graph_and_bypassed_the_original_one() -> None:
    changed = 0
    for path in templates():
        given = json.loads(path.read_text(encoding="utf-8"))
        before = copy.deepcopy(given)
        made = make_parallel(given)
        assert given == before, path.name
        for content, original in zip(levels(made.workflow), levels(given), strict=True):
            check_consistent(content)
            assert wiring(content) == wiring(original), path.name
        again = make_parallel(made.workflow)
        assert (again.workflow, again.added) == (made.workflow, ()), path.name
        changed += bool(made.added)
        if not made.added:
            assert made.workflow == given
    assert changed >= 200


def test_every_loader_is_followed_or_said_to_stay() -> None:
    for path in templates():
        made = make_parallel(json.loads(path.read_text(encoding="utf-8")))
        said = {each.loader.node for each in made.added} | {each.loader.node for each in made.kept}
        for content in levels(made.workflow):
            for node in content["nodes"]:
                used = any(out.get("links") and out["type"] in NODES for out in node.get("outputs") or ())
                if node["type"] in LOADERS and used:
                    assert str(node["id"]) in said, path.name


def test_new_nodes_lie_over_no_other() -> None:
    for path in templates()[::10]:
        made = make_parallel(json.loads(path.read_text(encoding="utf-8")))
        for content in levels(made.workflow):
            ours = [node for node in content["nodes"] if node["type"] in OURS]
            for node in ours:
                for other in content["nodes"]:
                    if other is not node and isinstance(other["pos"], list):
                        beside = node["pos"][0] + node["size"][0] < other["pos"][0] or node["pos"][0] > (
                            other["pos"][0] + _width(other)
                        )
                        apart = (
                            beside
                            or node["pos"][1] + node["size"][1] < other["pos"][1]
                            or node["pos"][1] > (other["pos"][1] + _height(other))
                        )
                        assert apart, (path.name, node["id"], other["id"])


def _width(node: dict[str, Any]) -> float:
    size = node["size"]
    return float(size["0"] if isinstance(size, dict) else size[0])


def _height(node: dict[str, Any]) -> float:
    size = node["size"]
    return float(size["1"] if isinstance(size, dict) else size[1])
