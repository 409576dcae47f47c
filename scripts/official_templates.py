"""ComfyUI's official templates: a template's graph as the prompt that the web page queues.

The page's own conversion is in JavaScript. ``tests/browser/test_official_templates.py`` holds this one against it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.comfy_api import Prompt
from scripts.install import templates_folder
from scripts.workflows import declared_inputs, is_widget

Node = dict[str, Any]
Info = Callable[[str], dict[str, Any]]
"""Returns what a server says about a node class."""

INPUTS, OUTPUTS = -10, -20
"""The ends of links that lead out of a subgraph."""
MUTED, BYPASSED = 2, 4
NOT_QUEUED = ("MarkdownNote", "Note", "Reroute")
AFTER_GENERATE = ("fixed", "randomize", "increment", "decrement")


def graph(name: str) -> dict[str, Any]:
    """A template in the web page's format."""
    content: dict[str, Any] = json.loads((templates_folder() / f"{name}.json").read_text(encoding="utf-8"))
    return content


def classes(name: str) -> set[str]:
    """The node classes of a template, without those that the page alone knows."""
    content = graph(name)
    subgraphs = content.get("definitions", {}).get("subgraphs", [])
    nodes = [node for each in (content, *subgraphs) for node in each["nodes"]]
    unlike = {each["id"] for each in subgraphs} | set(NOT_QUEUED)
    return {node["type"] for node in nodes} - unlike


def prompt(name: str, info: Info) -> Prompt:
    """A template in API format. Nodes of a subgraph are named as the page names them: ``140:127``."""
    return prompt_of(graph(name), info)


def prompt_of(content: dict[str, Any], info: Info) -> Prompt:
    """A workflow in the page's format, in API format."""
    subgraphs = {each["id"]: each for each in content.get("definitions", {}).get("subgraphs", [])}
    top = _Level(graph=content, subgraphs=subgraphs, info=info)
    return dict(top.entries())


@dataclass(frozen=True, kw_only=True)
class _Level:
    """The whole graph, or a subgraph where a node stands for it.

    Attributes:
        graph: its nodes and links.
        subgraphs: all definitions by id.
        info: see ``Info``.
        prefix: begins the names of its nodes.
        around: the level of the node that stands for it.
        instance: that node.
    """

    graph: dict[str, Any]
    subgraphs: Mapping[str, dict[str, Any]]
    info: Info
    prefix: str = ""
    around: "_Level | None" = None
    instance: Node = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[str, Node]]:
        """Its nodes in API format, with those of subgraphs."""
        for node in self.graph["nodes"]:
            if node.get("mode") in (MUTED, BYPASSED) or node["type"] in NOT_QUEUED:
                continue
            if node["type"] in self.subgraphs:
                yield from self.inner(node).entries()
            else:
                yield f"{self.prefix}{node['id']}", {"class_type": node["type"], "inputs": self.inputs(node)}

    def inner(self, node: Node) -> "_Level":
        """The level that a node stands for."""
        return _Level(
            graph=self.subgraphs[node["type"]], subgraphs=self.subgraphs, info=self.info,
            prefix=f"{self.prefix}{node['id']}:", around=self, instance=node,
        )  # fmt: skip

    def inputs(self, node: Node) -> Node:
        """A node's values, and the links that replace some of them."""
        found = widget_values(node, self.info(node["type"]))
        for slot in node.get("inputs", ()):
            if slot.get("link") is not None:
                source = self.source(slot["link"])
                found |= {} if source is None else {slot["name"]: source}
        return found

    def source(self, link_id: int) -> Any:
        """What an input gets by a link: another node's output, a value, or None where nothing comes."""
        origin, slot, _ = self.links()[link_id]
        if origin == INPUTS:
            return self.from_outside(slot)
        node = self.node(origin)
        if node.get("mode") == MUTED:
            return None
        if node["type"] == "Reroute" or node.get("mode") == BYPASSED:
            return self.through(node, slot)
        if node["type"] in self.subgraphs:
            return self.inner(node).output(slot)
        return [f"{self.prefix}{node['id']}", slot]

    def through(self, node: Node, slot: int) -> Any:
        """What goes through a bypassed node: its input of the same slot, or the first one of the same type."""
        kind = node["outputs"][slot]["type"]
        same = [*node["inputs"][slot : slot + 1], *node["inputs"]]
        link = next((each["link"] for each in same if each["type"] in (kind, "*") or node["type"] == "Reroute"), None)
        return None if link is None else self.source(link)

    def from_outside(self, slot: int) -> Any:
        """What comes into a subgraph: by a link, or the value that the node standing for it shows."""
        assert self.around is not None
        name = self.graph["inputs"][slot]["name"]
        for each in self.instance["inputs"]:
            if each["name"] == name and each.get("link") is not None:
                return self.around.source(each["link"])
        return self.value(name)

    def value(self, name: str) -> Any:
        """The value of a subgraph's input to which nothing leads."""
        shown = self.shown()
        slots = [number for number, each in enumerate(self.graph["inputs"]) if each["name"] == name]
        return shown[name] if name in shown else self.first_inside(slots[0])

    def first_inside(self, slot: int) -> Any:
        """The value of the first widget that a subgraph's input leads to: all of them show it."""
        for origin, number, (target, at) in self.links().values():
            node = self.node(target) if (origin, number) == (INPUTS, slot) else {"inputs": []}
            for each in node["inputs"][at : at + 1]:
                if "widget" in each and node["type"] in self.subgraphs:
                    return self.inner(node).value(each["name"])
                if "widget" in each:
                    return widget_values(node, self.info(node["type"])).get(each["name"])
        return None

    def shown(self) -> dict[str, Any]:
        """The values that the node standing for a subgraph shows."""
        if "widgets_values_named" in self.instance:
            return dict(self.instance["widgets_values_named"])
        values, names = self.instance.get("widgets_values") or [], []
        for number, each in enumerate(self.graph["inputs"]):
            ends = [link[2] for link in self.links().values() if link[:2] == (INPUTS, number)]
            if any("widget" in slot for node, at in ends for slot in self.node(node)["inputs"][at : at + 1]):
                names.append(each["name"])
        return dict(zip(names, values, strict=False))

    def output(self, slot: int) -> Any:
        """What comes out of a subgraph."""
        links = [number for number, link in self.links().items() if link[2] == (OUTPUTS, slot)]
        return self.source(links[0]) if links else None

    def node(self, node_id: int) -> Node:
        """One of its nodes."""
        return next(node for node in self.graph["nodes"] if node["id"] == node_id)

    def links(self) -> dict[int, tuple[int, int, tuple[int, int]]]:
        """Its links: from which node and output they lead to which node and input."""
        found = {}
        for link in self.graph["links"]:
            if isinstance(link, dict):
                link = [link[name] for name in ("id", "origin_id", "origin_slot", "target_id", "target_slot")]
            number, origin, origin_slot, target, target_slot, *_ = link
            found[number] = (origin, origin_slot, (target, target_slot))
        return found


def widget_values(node: Node, info: dict[str, Any]) -> Node:
    """The values of a node's widgets by the inputs that they belong to."""
    left, found, declared = list(node.get("widgets_values") or []), Node(), declared_inputs(info)
    _take(declared, "", left, found)
    return _defaults(declared) | found


def _defaults(declared: Mapping[str, tuple[str, dict[str, Any]]]) -> Node:
    """What the page has for widgets that a template, of an older version, lacks: the default, or the first choice."""
    widgets = {name: options for name, (kind, options) in declared.items() if is_widget(kind, options)}
    found = {name: options["default"] for name, options in widgets.items() if "default" in options}
    choices = {name: options["options"] for name, options in widgets.items() if options.get("options")}
    first = {name: some[0] for name, some in choices.items()}
    return {name: each["key"] if isinstance(each, dict) else each for name, each in first.items()} | found


def _take(declared: Mapping[str, tuple[str, dict[str, Any]]], prefix: str, left: list[Any], found: Node) -> None:
    """Give the next values to inputs, with those that a choice brings along after it."""
    for name, (kind, options) in declared.items():
        if not is_widget(kind, options) or not left:
            continue
        value = found[prefix + name] = left.pop(0)
        if options.get("control_after_generate") and left and left[0] in AFTER_GENERATE:
            left.pop(0)
        for choice in options.get("options") or ():
            if isinstance(choice, dict) and choice["key"] == value:
                _take(declared_inputs({"input": choice["inputs"]}), f"{prefix}{name}.", left, found)
