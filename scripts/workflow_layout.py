"""Where the nodes of an example workflow stand on the page, and inside of its subgraph: in groups."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Node = dict[str, Any]

WIDTH, GAP, MARGIN, TITLE = 340, 60, 20, 80
"""Pixels: a node's width, the room between nodes and around those of a group, and for its title and a node's."""
HIGHEST = 900
"""Pixels: the height from which on a group takes another column."""
EXTRA_HEIGHT = {
    "ParallelLoader": 60, "ParallelModel": 60, "ParallelVAE": 60, "CLIPTextEncode": 120,
    "TextEncodeQwenImageEditPlus": 120, "LoadImage": 260, "SaveImage": 340, "SaveAnimatedWEBP": 340, "SaveVideo": 340,
}  # fmt: skip
"""Pixels that a node needs beyond its slots: for its state, a text box or an image."""
OURS = re.compile("^Parallel(Loader|Model|VAE|Layout)$")
MODELS = re.compile("Loader(Simple|ModelOnly)?$|^ModelSampling|^CFGNorm$")
PROMPT = re.compile("TextEncode|Prompt$|^LoadImage|ImageScale$|^T5Tokenizer")
SUBGRAPH = re.compile("^[0-9a-f]{8}-[0-9a-f-]{27}$")
"""A subgraph's id is the class of the nodes that stand for it."""
GROUPS = (
    ("Several GPUs", "#8a5fb0", OURS),
    ("Models", "#3f789e", MODELS),
    ("Sampling", "#88aa88", re.compile(f"Sampler|Sampling|Guider|Scheduler|Sigmas|Noise|{SUBGRAPH.pattern}")),
    ("Result", "#aa8888", re.compile("Decode|^Create|^Save|^LTXVSeparate")),
    ("Prompt", "#b58b2a", PROMPT),
    ("Size and conditioning", "#7a7a3c", re.compile("")),
)
"""Title, colour, and the classes of its nodes. The first group whose pattern fits has a node."""
COLUMNS = (("Models",), ("Several GPUs", "Prompt"), ("Size and conditioning",), ("Sampling",), ("Result",))
"""The groups from left to right, each one above the next."""


def group_of(kind: str) -> str:
    """The title of the group of a node class."""
    return next(title for title, _, pattern in GROUPS if pattern.search(kind))


def place(nodes: Sequence[Node], links: Iterable[Sequence[Any]], left: int = 0) -> list[dict[str, Any]]:
    """Give the nodes of one level sizes, places and an order, and return the groups that they are in.

    Args:
        nodes: those of the page, or of a subgraph.
        links: theirs, as number, source, output, target, input, type.
        left: pixels, where the first group begins.
    """
    ordered = _from_sources(nodes, links)
    for order, node in enumerate(ordered):
        rows = len(node["inputs"]) + len(node["outputs"])
        node["size"] = [WIDTH, 40 + 26 * rows + EXTRA_HEIGHT.get(node["type"], 0)]
        node["order"] = order
    groups: list[dict[str, Any]] = []
    for titles in COLUMNS:
        top, right = 0, left
        for title in titles:
            group = _group(title, [node for node in ordered if group_of(node["type"]) == title], left, top)
            if group is not None:
                groups.append({"id": len(groups) + 1, **group})
                _, _, width, height = group["bounding"]
                top, right = top + height + GAP, max(right, left + width + GAP)
        left = right
    return groups


def _from_sources(nodes: Sequence[Node], links: Iterable[Sequence[Any]]) -> list[Node]:
    """The nodes in the order in which they run."""
    depth = {node["id"]: 0 for node in nodes}
    links = [link for link in links if link[1] in depth and link[3] in depth]
    for _ in nodes:
        for _, source, _, target, *_ in links:
            depth[target] = max(depth[target], depth[source] + 1)
    return sorted(nodes, key=lambda node: depth[node["id"]])


def _group(title: str, nodes: Sequence[Node], left: int, top: int) -> dict[str, Any] | None:
    """Place the nodes of a group in columns; None without nodes."""
    if not nodes:
        return None
    x, y, bottom = left + MARGIN, top + TITLE, 0
    for node in nodes:
        height = node["size"][1]
        if y > top + TITLE and y + height > top + HIGHEST:
            x, y = x + WIDTH + GAP, top + TITLE
        node["pos"] = [x, y]
        bottom = max(bottom, y + height)
        y += height + GAP
    colour = next(colour for each, colour, _ in GROUPS if each == title)
    bounding = [left, top, x + WIDTH + MARGIN - left, bottom + MARGIN - top]
    return {"title": title, "bounding": bounding, "color": colour, "font_size": 24, "flags": {}}
