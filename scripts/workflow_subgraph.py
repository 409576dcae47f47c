"""The inner part of an example workflow as a subgraph: what lies between models, prompts and the saved file.

Its node on the page has the values that people change, and each of them once, also where several nodes inside need it.
All supported versions of ComfyUI read subgraphs. The format is that of the page's workflow schema, version 1.
"""

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.workflow_layout import MODELS, OURS, PROMPT, WIDTH, Node, place

TITLE = "Sample and decode"
INPUTS, OUTPUTS = -10, -20
"""The ends of links that lead out of a subgraph."""
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
"""The names of what a link has, where it is no list."""
END_WIDTH, END_ROW = 140, 20
"""Pixels of the ends as the page draws them."""
SAVE = re.compile("^Save")
SHOWN = {
    "width": "width", "height": "height", "length": "length", "frames_number": "length", "guidance": "guidance",
    "steps": "steps", "cfg": "cfg", "cfg_text": "cfg_text", "cfg_frames": "cfg_frames", "seed": "seed",
    "noise_seed": "noise_seed",
}  # fmt: skip
"""The widgets that the node on the page shows, in order, and under which name. Those of one name are one."""


def fold(
    graph: dict[str, Any], node_id: int, inside: set[int], *, title: str = TITLE, shown: Mapping[str, str] = SHOWN
) -> None:
    """Put nodes of a graph into a subgraph, with a node in their place.

    Args:
        graph: one level, whose links are lists, in the page's format.
        node_id: the number of the new node.
        inside: the numbers of the nodes. Whatever lies between two of them is one of them.
        title: the subgraph's name.
        shown: see ``SHOWN``.

    Raises:
        ValueError: nodes that share a shown value have different ones.
    """
    subgraph = _Subgraph(
        node_id=node_id,
        title=title,
        shown=shown,
        nodes={node["id"]: node for node in graph["nodes"] if node["id"] in inside},
        links=graph["links"],
    )
    subgraph.connect()
    graph["nodes"] = [node for node in graph["nodes"] if node["id"] not in inside]
    graph["links"] = subgraph.around
    graph["last_link_id"] = max(link[0] for link in subgraph.around)
    definition = subgraph.definition(str(uuid.uuid5(uuid.UUID(graph["id"]), title)))
    graph["nodes"].append(subgraph.instance(definition["id"]))
    _lay_out(definition)
    graph["definitions"] = {"subgraphs": [definition]}
    count_links(graph["nodes"], graph["links"])


def _lay_out(definition: dict[str, Any]) -> None:
    """Give the inner nodes their places, with the ends on both sides."""
    links = [[link[name] for name in LINK] for link in definition["links"]]
    groups = definition["groups"] = place(definition["nodes"], links)
    definition["state"]["lastGroupId"] = len(groups)
    right = max(group["bounding"][0] + group["bounding"][2] for group in groups)
    for side, slots, left in (("inputNode", "inputs", -WIDTH), ("outputNode", "outputs", right + WIDTH // 2)):
        count = len(definition[slots])
        definition[side]["bounding"] = [left, 0, END_WIDTH, END_ROW * (count + 2)]
        for number, slot in enumerate(definition[slots]):
            slot["pos"] = [left + END_ROW, END_ROW * (number + 1)]


def inner_ids(graph: dict[str, Any]) -> set[int]:
    """The nodes that go into the subgraph: all but models, prompts, what these need, and what saves."""
    kinds = {node["id"]: node["type"] for node in graph["nodes"]}
    outside = {key for key, kind in kinds.items() if any(each.search(kind) for each in (MODELS, OURS, PROMPT))}
    while more := {link[1] for link in graph["links"] if link[3] in outside} - outside:
        outside |= more
    return {key for key, kind in kinds.items() if key not in outside and not SAVE.search(kind)}


def count_links(nodes: Iterable[Node], links: Iterable[list[Any]]) -> None:
    """Write the numbers of links into the outputs that they come from."""
    links = list(links)
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in links if link[1:3] == [node["id"], slot]]


@dataclass(kw_only=True)
class _Subgraph:
    """A subgraph while it is made.

    Attributes:
        node_id: the node that stands for it.
        title: its name.
        shown: see ``SHOWN``.
        nodes: those inside.
        links: all links before.
        inner: the links inside.
        around: those outside.
        inputs: by what leads to it, a source outside or the name of a shown value: the input.
        outputs: by source inside: the output.
    """

    node_id: int
    title: str
    shown: Mapping[str, str]
    nodes: dict[int, Node]
    links: list[list[Any]]
    inner: list[list[Any]] = field(default_factory=list)
    around: list[list[Any]] = field(default_factory=list)
    inputs: dict[Any, Node] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Node] = field(default_factory=dict)

    def connect(self) -> None:
        """Sort the links, and make inputs and outputs for those that cross."""
        for link in sorted(self.links, key=lambda link: (link[3], link[4])):
            number, source, slot, target, at, kind = link
            if source in self.nodes and target in self.nodes:
                self.inner.append(link)
            elif target in self.nodes:
                self._enter(link)
            elif source in self.nodes:
                made = self.outputs.setdefault((source, slot), self._slot(kind.upper(), kind, self.outputs))
                if not made["linkIds"]:
                    self.inner.append([number, source, slot, OUTPUTS, self._place(self.outputs, made), kind])
                    made["linkIds"].append(number)
                self.around.append([number, self.node_id, self._place(self.outputs, made), target, at, kind])
            else:
                self.around.append(link)
        for name in dict.fromkeys(self.shown.values()):
            self._show(name)
        count_links(self.nodes.values(), self.inner)

    def _enter(self, link: list[Any]) -> None:
        """Lead a link from outside through an input. Links from the same output share one."""
        number, source, slot, target, at, kind = link
        known = (source, slot) in self.inputs
        name = self.nodes[target]["inputs"][at]["name"]
        made = self.inputs.setdefault((source, slot), self._slot(name, kind, self.inputs))
        place = self._place(self.inputs, made)
        if not known:
            self.around.append([number, source, slot, self.node_id, place, kind])
        self.inner.append([number, INPUTS, place, target, at, kind])
        made["linkIds"].append(number)

    def _show(self, name: str) -> None:
        """Show a value on the node that stands for this: one input leads to the widgets of all nodes that have it."""
        ends = [(node, at) for node, at in self._widgets() if self.shown.get(node["inputs"][at]["name"]) == name]
        if not ends:
            return
        values = {value_of(node, at) for node, at in ends}
        if len(values) > 1:
            raise ValueError(f"{name} is one value on the page, and nodes have {sorted(values)}: give them one")
        made = self.inputs[name] = self._slot(name, ends[0][0]["inputs"][ends[0][1]]["type"], self.inputs)
        made["widget"] = True
        for node, at in ends:
            number = max((link[0] for link in [*self.links, *self.inner]), default=0) + 1
            self.inner.append([number, INPUTS, self._place(self.inputs, made), node["id"], at, made["type"]])
            node["inputs"][at]["link"] = number
            made["linkIds"].append(number)

    def _widgets(self) -> Iterator[tuple[Node, int]]:
        """The widgets to which no link leads, as node and input."""
        for node in self.nodes.values():
            for at, slot in enumerate(node["inputs"]):
                if "widget" in slot and slot["link"] is None:
                    yield node, at

    def _slot(self, name: str, kind: str, others: dict[Any, Node]) -> Node:
        """An input or output whose name none of the others has."""
        taken = sum(re.sub(r"_\d+$", "", each["name"]) == name for each in others.values())
        name = f"{name}_{taken + 1}" if taken else name
        return {"name": name, "type": kind, "linkIds": []}

    @staticmethod
    def _place(slots: dict[Any, Node], one: Node) -> int:
        return next(number for number, each in enumerate(slots.values()) if each is one)

    def definition(self, key: str) -> dict[str, Any]:
        """The subgraph in the page's format. Its nodes have no places yet."""
        return {
            "id": key,
            "version": 1,
            "state": {
                "lastGroupId": 0,
                "lastNodeId": max(self.nodes),
                "lastLinkId": max(link[0] for link in self.inner),
                "lastRerouteId": 0,
            },
            "revision": 0,
            "config": {},
            "name": self.title,
            "inputNode": {"id": INPUTS},
            "outputNode": {"id": OUTPUTS},
            "inputs": [_end(key, "input", slot) for slot in self.inputs.values()],
            "outputs": [_end(key, "output", slot) for slot in self.outputs.values()],
            "widgets": [],
            "nodes": list(self.nodes.values()),
            "groups": [],
            "links": [dict(zip(LINK, link, strict=True)) for link in sorted(self.inner)],
            "extra": {},
        }

    def instance(self, key: str) -> Node:
        """The node that stands for the subgraph."""
        arriving = {link[4]: link[0] for link in self.around if link[3] == self.node_id}
        inputs = []
        for number, slot in enumerate(self.inputs.values()):
            widget = {"widget": {"name": slot["name"]}} if slot.get("widget") else {}
            inputs.append({"name": slot["name"], "type": slot["type"], **widget, "link": arriving.get(number)})
        outputs = [{"name": slot["name"], "type": slot["type"], "links": []} for slot in self.outputs.values()]
        return {
            "id": self.node_id, "type": key, "flags": {}, "mode": 0, "inputs": inputs, "outputs": outputs,
            "title": self.title, "properties": {}, "widgets_values": [],
        }  # fmt: skip


def _end(key: str, side: str, slot: Node) -> Node:
    """An input or output of a definition."""
    made = str(uuid.uuid5(uuid.UUID(key), f"{side} {slot['name']}"))
    return {"id": made, "name": slot["name"], "type": slot["type"], "linkIds": slot["linkIds"]}


def value_of(node: Node, at: int) -> Any:
    """The value of the widget of an input. A seed has another value behind its own."""
    value, values = None, iter(node["widgets_values"])
    for slot in node["inputs"][: at + 1]:
        if "widget" in slot:
            value = next(values)
            if slot["name"] in ("seed", "noise_seed"):
                next(values)
    return value
