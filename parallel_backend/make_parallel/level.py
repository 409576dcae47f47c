"""One level of a workflow in the page's format: the graph, or the inside of a subgraph. Their links are written
differently."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Node = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Taker:
    """What a link leads to.

    Attributes:
        link: the link's id.
        node: the node; None for an output of the subgraph.
        input: the number of its input.
    """

    link: int
    node: Node | None
    input: int


class Level:
    """The nodes and links of a level, which it changes.

    Args:
        content: the level's object.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.nodes: list[Node] = content["nodes"]
        self._by_id = {node["id"]: node for node in self.nodes}
        self._links = {_id(link): link for link in content.get("links") or []}

    @property
    def link_ids(self) -> list[int]:
        """The ids of all links."""
        return list(self._links)

    def takers(self, node: Node, output: int) -> list[Taker]:
        """Return what takes an output of a node."""
        ids = node["outputs"][output].get("links") or []
        found = [(number, _target(self._links[number])) for number in ids if number in self._links]
        return [Taker(link=number, node=self._by_id.get(to), input=at) for number, (to, at) in found]

    def reached(self, takers: list[Taker], kind: str) -> list[Node]:
        """Return what takes an output, and what gets it passed on: by an output of the same kind."""
        pending, seen = [each.node for each in takers if each.node], dict[Any, Node]()
        while pending:
            node = pending.pop()
            if node["id"] not in seen:
                seen[node["id"]] = node
                outputs = [at for at, each in enumerate(node.get("outputs") or ()) if each.get("type") in (kind, "*")]
                pending += [each.node for at in outputs for each in self.takers(node, at) if each.node]
        return list(seen.values())

    def insert(self, new: Node, link: int, source: Node, output: int, kind: str) -> None:
        """Put a node behind an output: it takes the output by a new link, and what took it takes the node.

        Args:
            new: the node, whose first input and output are those to use.
            link: the id of the new link.
            source: the node whose output it is.
            output: the output's number.
            kind: the output's type.
        """
        before = source["outputs"][output]["links"]
        for number in before:
            if number in self._links:
                _set_origin(self._links[number], new["id"])
        source["outputs"][output]["links"] = [link]
        new["inputs"][0]["link"], new["outputs"][0]["links"] = link, before
        made = _link(link, source["id"], output, new["id"], kind, like=next(iter(self._links.values()), []))
        self.content["links"].append(made)
        self._links[link], self._by_id[new["id"]] = made, new
        self.nodes.append(new)

    def free_place(self, source: Node, size: list[float]) -> list[float]:
        """Return where a node of a size has room: right of another one, or below that place."""
        x, y = _pair(source.get("pos"), 0.0)
        width, _ = _pair(source.get("size"), 200.0)
        left, top = x + width + 40, y
        while taken := next(filter(None, (_overlap(node, left, top, size) for node in self.nodes)), None):
            top = taken + 50
        return [left, top]


def _overlap(node: Node, left: float, top: float, size: list[float]) -> float:
    """Return the lower edge of a node if a rectangle with its title would lie over it; 0 if not."""
    (x, y), (width, height) = _pair(node.get("pos"), 0.0), _pair(node.get("size"), 200.0)
    beside = left + size[0] < x or left > x + width
    apart = beside or top + size[1] + 35 < y or top - 35 > y + height
    return 0.0 if apart else max(y + height, top + 1)


def _pair(value: Any, otherwise: float) -> tuple[float, float]:
    """Return two numbers, which the page writes as a list or as an object."""
    if isinstance(value, dict):
        value = [value.get("0"), value.get("1")]
    numbers = [float(each) if isinstance(each, int | float) else otherwise for each in list(value or ())[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (otherwise, otherwise)


def _id(link: Any) -> int:
    number: int = link["id"] if isinstance(link, dict) else link[0]
    return number


def _target(link: Any) -> tuple[Any, int]:
    return (link["target_id"], link["target_slot"]) if isinstance(link, dict) else (link[3], link[4])


def _set_origin(link: Any, node: int) -> None:
    if isinstance(link, dict):
        link["origin_id"], link["origin_slot"] = node, 0
    else:
        link[1:3] = [node, 0]


def _link(number: int, origin: int, output: int, target: int, kind: str, *, like: Any) -> Any:
    if isinstance(like, dict):
        ends = {"origin_id": origin, "origin_slot": output, "target_id": target, "target_slot": 0}
        return {"id": number, **ends, "type": kind}
    return [number, origin, output, target, 0, kind]


def levels(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a workflow's graph, and the definitions of its subgraphs."""
    yield workflow
    definitions = workflow.get("definitions")
    subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    yield from subgraphs or ()
