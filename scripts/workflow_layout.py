"""Where the nodes of an example workflow stand on the page: in groups, beside a note of what to get.

The page shows the note as text. No prompt has it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Node = dict[str, Any]
Files = Sequence[dict[str, str]]
"""Model files, or folders: name, url or repository, and the folder under ``models``."""

NOTE = "MarkdownNote"
WIDTH, GAP, MARGIN, TITLE = 340, 60, 20, 80
"""Pixels: a node's width, the room between nodes and around those of a group, and for its title and a node's."""
NOTE_WIDTH, HIGHEST = 460, 900
"""Pixels: the note's width, and the height from which on a group takes another column."""
EXTRA_HEIGHT = {
    "ParallelLoader": 60, "ParallelModel": 60, "ParallelVAE": 60, "CLIPTextEncode": 120,
    "TextEncodeQwenImageEditPlus": 120, "LoadImage": 260, "SaveImage": 340, "SaveAnimatedWEBP": 340, "SaveVideo": 340,
}  # fmt: skip
"""Pixels that a node needs beyond its slots: for its state, a text box or an image."""
GROUPS = (
    ("Several GPUs", "#8a5fb0", re.compile("^Parallel(Loader|Model|VAE|Layout)$")),
    ("Models", "#3f789e", re.compile("Loader(Simple|ModelOnly)?$|^ModelSampling|^CFGNorm$")),
    ("Sampling", "#88aa88", re.compile("Sampler|Sampling|Guider|Scheduler|Sigmas|Noise")),
    ("Result", "#aa8888", re.compile("Decode|^Create|^Save|^LTXVSeparate")),
    ("Prompt and size", "#b58b2a", re.compile("")),
)
"""Title, colour, and the classes of its nodes. The first group whose pattern fits has a node."""
COLUMNS = (("Models",), ("Several GPUs", "Prompt and size"), ("Sampling",), ("Result",))
"""The groups from left to right, each one above the next."""


def group_of(kind: str) -> str:
    """The title of the group of a node class."""
    return next(title for title, _, pattern in GROUPS if pattern.search(kind))


def place(graph: dict[str, Any], name: str, *, files: Files, folders: Files) -> None:
    """Give a graph's nodes their places, and add its groups and its note."""
    nodes = graph["nodes"]
    ordered = _from_sources(nodes, graph["links"])
    for order, node in enumerate(ordered):
        rows = len(node["inputs"]) + len(node["outputs"])
        node["size"] = [WIDTH, 40 + 26 * rows + EXTRA_HEIGHT.get(node["type"], 0)]
        node["order"] = order
    left = NOTE_WIDTH + GAP
    for titles in COLUMNS:
        top, right = 0, left
        for title in titles:
            group = _group(title, [node for node in ordered if group_of(node["type"]) == title], left, top)
            if group is not None:
                graph["groups"].append({"id": len(graph["groups"]) + 1, **group})
                _, _, width, height = group["bounding"]
                top, right = top + height + GAP, max(right, left + width + GAP)
        left = right
    graph["last_node_id"] += 1
    text = note(name, {node["type"] for node in nodes}, files=files, folders=folders)
    nodes.append(_note(graph["last_node_id"], text))


def _from_sources(nodes: Sequence[Node], links: Iterable[Sequence[Any]]) -> list[Node]:
    """The nodes in the order in which they run."""
    depth = {node["id"]: 0 for node in nodes}
    links = list(links)
    for _ in nodes:
        for _, source, _, target, _, _ in links:
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


def _note(node_id: int, text: str) -> Node:
    return {
        "id": node_id, "type": NOTE, "flags": {}, "mode": 0, "inputs": [], "outputs": [], "title": "Read me",
        "pos": [0, TITLE], "size": [NOTE_WIDTH - GAP, 120 + 30 * len(text.splitlines())], "order": 0,
        "properties": {}, "widgets_values": [text], "color": "#432", "bgcolor": "#653",
    }  # fmt: skip


def note(name: str, kinds: set[str], *, files: Files, folders: Files) -> str:
    """What a person has to know of a workflow: its files and their folders, and what its GPUs are."""
    lines = [f"# {name}", "", "## Files", ""]
    for each in folders:
        lines += ["In ComfyUI's folder:", "", "```", download(each), "```", ""]
    if not files and not folders:
        lines += ["Nothing to download: it uses the small checkpoint that comes with Parallel DiT.", ""]
    for folder in sorted({file["directory"] for file in files}):
        lines += [f"In `ComfyUI/models/{folder}`:", ""]
        lines += [f"- [{file['name']}]({file['url']})" for file in files if file["directory"] == folder]
        lines += [""]
    lines += ["## GPUs", "", _of_gpus(kinds)]
    if "LoadImage" in kinds:
        lines += ["", "Choose your picture in *Load Image*."]
    return "\n".join(lines)


def download(folder: dict[str, str]) -> str:
    """The command that brings a folder, to run in ComfyUI's folder."""
    return f"hf download {folder['repository']} --local-dir models/{folder['directory']}/{folder['name']}"


def _of_gpus(kinds: set[str]) -> str:
    if "ParallelLoader" in kinds:
        return "*Parallel Loader* uses all of them. For some of them write their numbers into `devices`, such as `0,1`."
    ours = " and ".join(f"*Parallel {each}*" for each in ("Model", "VAE") if f"Parallel{each}" in kinds)
    return (
        f"{ours} use all of them. For some of them write their numbers into `devices`, such as `0,1`. "
        "Bypassed (Ctrl+B) they leave everything to ComfyUI and one GPU."
    )
