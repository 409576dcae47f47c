"""A workflow in the web page's format, with its subgraphs."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .level import Level, Node, Taker, levels
from .loaders import LOADERS, PARALLEL, TEXT, Known, Readable, reason
from .report import NODES, Added, Kept, Kind, Loader, Made

_INACTIVE = (2, 4)
"""The modes of muted and of bypassed nodes."""
_SIZE = {"MODEL": [270.0, 160.0], "VAE": [270.0, 60.0]}
_WIDGETS = {
    "MODEL": {"devices": "STRING", "layout": "PARALLEL_LAYOUT", "attention": "COMBO", "compile": "COMBO"},
    "VAE": {"devices": "STRING"},
}
_SLOT = "PARALLEL_LAYOUT"


def make_parallel(given: Mapping[str, Any], readable: Readable, devices: str) -> Made:
    """Put nodes behind the loaders of a workflow and of its subgraphs."""
    workflow = copy.deepcopy(dict(given))
    contents = list(levels(workflow))
    work = _Work(levels=[Level(each) for each in contents], readable=readable, devices=devices)
    for level in work.levels:
        for node in list(level.nodes):
            work.visit(level, node)
    if work.added:
        for content in contents:
            work.count(content)
    return Made(workflow=workflow, added=tuple(work.added), kept=tuple(work.kept))


@dataclass(kw_only=True)
class _Work:
    """The work on one workflow.

    Attributes:
        levels: of the workflow.
        readable: see ``Readable``.
        devices: of the new nodes.
        added: what was put in.
        kept: what stays as it is.
    """

    levels: list[Level]
    readable: Readable
    devices: str
    added: list[Added] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find the highest ids: the page counts nodes and links of all levels together."""
        numbers = [node["id"] for level in self.levels for node in level.nodes if isinstance(node["id"], int)]
        self._node = max([*numbers, *(_last(level.content, "node") for level in self.levels)], default=0)
        links = [number for level in self.levels for number in level.link_ids]
        self._subgraphs = {level.content.get("id") for level in self.levels}
        self._link = max([*links, *(_last(level.content, "link") for level in self.levels)], default=0)

    def visit(self, level: Level, node: Node) -> None:
        """Put nodes behind the outputs of a node, if it is a loader."""
        loader = Loader(node=str(node["id"]), type=node["type"], title=str(node.get("title") or node["type"]))
        known = LOADERS.get(node["type"])
        if TEXT.search(node["type"]):
            self.kept.append(Kept(loader=loader, kind="CLIP", reason="text"))
        if known is None:
            self.kept += [Kept(loader=loader, kind=kind, reason="unknown") for kind in self._made_by(node)]
            return
        for kind, output in known.outputs.items():
            if len(node.get("outputs") or ()) > output and (takers := level.takers(node, output)):
                self._follow(level, node, loader, known, kind, takers)

    def _made_by(self, node: Node) -> list[str]:
        """Return which of MODEL and VAE a node makes from something else, if something takes it."""
        if node["type"] in PARALLEL or node["type"] in self._subgraphs:
            return []
        taken = {slot.get("type") for slot in node.get("inputs") or ()}
        made = {slot["type"]: None for slot in node.get("outputs") or () if slot.get("links")}
        return [kind for kind in NODES if kind in made and not taken & {kind, "*"}]

    def _follow(self, level: Level, node: Node, loader: Loader, known: Known, kind: Kind, takers: list[Taker]) -> None:
        kept = self._why(level, node, loader, known, kind, takers)
        if kept:
            self.kept.append(kept)
            return
        self._node, self._link = self._node + 1, self._link + 1
        new = _node(self._node, kind, level.free_place(node, _SIZE[kind]), node, self.devices)
        level.insert(new, self._link, node, known.outputs[kind], kind)
        self.added.append(Added(loader=loader, kind=kind, node=str(self._node)))

    def _why(
        self, level: Level, node: Node, loader: Loader, known: Known, kind: Kind, takers: list[Taker]
    ) -> Kept | None:
        if node.get("mode") in _INACTIVE:
            return Kept(loader=loader, kind=kind, reason="inactive")
        file = _file(node, known.file)
        near = [each.node["type"] for each in takers if each.node]
        downstream = {each["type"] for each in level.reached(takers, kind)}
        why = reason(node["type"], kind, file, near, downstream)
        if why:
            return Kept(loader=loader, kind=kind, reason=why)
        detail = self.readable(node["type"], file, kind) if file else ""
        return Kept(loader=loader, kind=kind, reason="file", detail=detail) if detail else None

    def count(self, content: dict[str, Any]) -> None:
        """Write the highest ids into a level."""
        if isinstance(content.get("state"), dict):
            content["state"] |= {"lastNodeId": self._node, "lastLinkId": self._link}
        for name, number in (("last_node_id", self._node), ("last_link_id", self._link)):
            if name in content:
                content[name] = number


def _last(content: Mapping[str, Any], what: str) -> int:
    state = content.get("state")
    given = state.get(f"last{what.capitalize()}Id", 0) if isinstance(state, dict) else content.get(f"last_{what}_id", 0)
    return given if isinstance(given, int) else 0


def _file(node: Node, name: str) -> str:
    """Return the file that a loader names: its first widget, unless the page has names for the values."""
    values = node.get("widgets_values")
    found = values.get(name) if isinstance(values, dict) else next(iter(values or ()), "")
    return found if isinstance(found, str) else ""


def _node(number: int, kind: Kind, place: list[float], source: Node, devices: str) -> Node:
    slots: list[Node] = [{"name": kind.lower(), "type": kind, "link": None}]
    for name, type_ in _WIDGETS[kind].items():
        more = {"shape": 7} if type_ == _SLOT else {"widget": {"name": name}}
        slots.append({"name": name, "type": type_, "link": None, **more})
    return {
        "id": number, "type": NODES[kind], "pos": place, "size": list(_SIZE[kind]), "flags": {},
        "order": source.get("order", 0), "mode": 0, "inputs": slots,
        "outputs": [{"name": kind, "type": kind, "links": []}],
        "properties": {"Node name for S&R": NODES[kind]},
        "widgets_values": [devices, "auto", "off"] if kind == "MODEL" else [devices],
    }  # fmt: skip
