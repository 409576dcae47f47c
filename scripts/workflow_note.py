"""The note of an example workflow: which files to get and where they go, which GPUs it uses, where its values are.

The page shows it as text. No prompt has it.
"""

from collections.abc import Sequence

from scripts.workflow_layout import GAP, TITLE, Node
from scripts.workflow_subgraph import TITLE as SUBGRAPH

Files = Sequence[dict[str, str]]
"""Model files, or folders: name, url or repository, and the folder under ``models``."""

NOTE = "MarkdownNote"
WIDTH = 460
"""Pixels, with the room to what stands beside it."""


def node(node_id: int, words: str) -> Node:
    """The node of a note."""
    return {
        "id": node_id, "type": NOTE, "flags": {}, "mode": 0, "inputs": [], "outputs": [], "title": "Read me",
        "pos": [0, TITLE], "size": [WIDTH - GAP, 120 + 30 * len(words.splitlines())], "order": 0,
        "properties": {}, "widgets_values": [words], "color": "#432", "bgcolor": "#653",
    }  # fmt: skip


def text(name: str, kinds: set[str], *, files: Files, folders: Files, comfyui: str, values: Sequence[str]) -> str:
    """What a person has to know of a workflow.

    Args:
        name: its name.
        kinds: the classes of its nodes.
        files: those that it loads.
        folders: in diffusers layout, those that it loads.
        comfyui: the oldest version that has the model; empty for all.
        values: what its subgraph's node shows; none without a subgraph.
    """
    lines = [f"# {name}", ""]
    if comfyui:
        lines += [f"Needs ComfyUI {comfyui} or newer.", ""]
    lines += ["## Files", ""]
    for each in folders:
        lines += ["In ComfyUI's folder:", "", "```", download(each), "```", ""]
    if not files and not folders:
        lines += ["Nothing to download: it uses the small checkpoint that comes with Parallel DiT.", ""]
    for folder in sorted({file["directory"] for file in files}):
        lines += [f"In `ComfyUI/models/{folder}`:", ""]
        lines += [f"- [{file['name']}]({file['url']})" for file in files if file["directory"] == folder]
        lines += [""]
    lines += ["## GPUs", "", _of_gpus(kinds)]
    if values:
        lines += ["", "## Values", "", _of_values(values)]
    if "LoadImage" in kinds:
        lines += ["", "Choose your picture in *Load Image*."]
    return "\n".join(lines)


def download(folder: dict[str, str]) -> str:
    """The command that brings a folder, to run in ComfyUI's folder."""
    return f"hf download {folder['repository']} --local-dir models/{folder['directory']}/{folder['name']}"


def _of_values(values: Sequence[str]) -> str:
    names = ", ".join(f"`{value}`" for value in values)
    return (
        f"On *{SUBGRAPH}*: {names}. It is a subgraph: the button in its upper right corner opens it, and shows what is "
        "inside."
    )


def _of_gpus(kinds: set[str]) -> str:
    if "ParallelLoader" in kinds:
        return "*Parallel Loader* uses all of them. For some of them write their numbers into `devices`, such as `0,1`."
    ours = " and ".join(f"*Parallel {each}*" for each in ("Model", "VAE") if f"Parallel{each}" in kinds)
    return (
        f"{ours} use all of them. For some of them write their numbers into `devices`, such as `0,1`. "
        "Bypassed (Ctrl+B) they leave everything to ComfyUI and one GPU."
    )
