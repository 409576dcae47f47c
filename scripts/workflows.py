"""The example workflows in both formats.

The files in ``workflows/api`` are written by hand in API format, which is the bare prompt. The files in ``workflows``,
which the web page opens, are generated from them: graphs with positions and widget values.
"""

import json
import uuid
from typing import Any

from scripts import workflow_layout, workflow_note, workflow_subgraph
from scripts.comfy_api import Prompt
from scripts.comfy_paths import ROOT

FOLDER = ROOT / "workflows"
API_FOLDER = FOLDER / "api"
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")

Node = dict[str, Any]


def names() -> list[str]:
    """The names of the workflows."""
    return sorted(path.stem for path in API_FOLDER.glob("*.json"))


def api(name: str) -> Prompt:
    """A workflow in API format."""
    prompt: Prompt = json.loads((API_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return prompt


def needed_files(name: str) -> list[dict[str, str]]:
    """The model files that a workflow loads: name, url, and the folder under ``models``. The web page offers them."""
    return _named(api(name), "models")


def needed_folders(name: str) -> list[dict[str, str]]:
    """The folders in diffusers layout that a workflow loads: name, repository, and the folder under ``models``."""
    return _named(api(name), "folders")


def needed_comfyui(name: str) -> str:
    """The oldest ComfyUI that has a workflow's model, such as ``0.30``; empty where all supported ones do."""
    return _comfyui(api(name))


def needed_release(name: str) -> tuple[int, ...]:
    """``needed_comfyui`` as numbers that can be compared; none where all supported versions will do."""
    return tuple(int(part) for part in needed_comfyui(name).split(".") if part)


def needs_download(name: str) -> bool:
    """Whether a workflow needs more than the checkpoint that is included."""
    return bool(needed_files(name) or needed_folders(name))


def _named(prompt: Prompt, kind: str) -> list[dict[str, str]]:
    """What a prompt's nodes need of a kind. What two of them load is there once."""
    found = [each for node in prompt.values() for each in node.get("_meta", {}).get(kind, [])]
    return list({(each["directory"], each["name"]): each for each in found}.values())


def _comfyui(prompt: Prompt) -> str:
    return "".join(node.get("_meta", {}).get("comfyui", "") for node in prompt.values())


def graph(name: str) -> dict[str, Any]:
    """A workflow in the web page's format."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def declared_inputs(info: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The inputs of a node class in order, as name: (type, options).

    A list of choices has the type ``COMBO``, and so has one whose choices bring inputs along. An input that takes
    several types has that of its widget.
    """
    entries = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    options = {name: entry[1] if len(entry) > 1 else {} for name, entry in entries.items()}
    kinds = {
        name: "COMBO" if isinstance(entry[0], list) or entry[0] == "COMFY_DYNAMICCOMBO_V3" else entry[0]
        for name, entry in entries.items()
    }
    return {name: (options[name].get("widgetType") or kind, options[name]) for name, kind in kinds.items()}


def is_widget(kind: str, options: dict[str, Any]) -> bool:
    """Whether the web page shows an input as a widget."""
    return kind in WIDGET_TYPES and not options.get("forceInput")


def with_options(prompt: Prompt, object_info: dict[str, Any]) -> Prompt:
    """A prompt as the web page queues it: without titles, and with a default for each widget that it leaves out."""
    return {
        key: {
            "class_type": entry["class_type"],
            "inputs": _defaults(object_info[entry["class_type"]], entry["inputs"]) | entry["inputs"],
        }
        for key, entry in prompt.items()
    }


def flat(prompt: Prompt) -> Prompt:
    """A prompt whose nodes in subgraphs, such as ``12:5``, have the numbers that they have in the subgraph."""
    return {
        _last(key): {
            "class_type": entry["class_type"],
            "inputs": {
                name: [_last(value[0]), value[1]] if isinstance(value, list) else value
                for name, value in entry["inputs"].items()
            },
        }
        for key, entry in prompt.items()
    }


def _last(key: str) -> str:
    return key.rpartition(":")[2]


def _defaults(info: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    widgets = {name: options for name, (kind, options) in declared_inputs(info).items() if is_widget(kind, options)}
    defaults = {name: options["default"] for name, options in widgets.items() if "default" in options}
    for name, options in widgets.items():
        defaults |= _brought_along(name, options, given.get(name))
    return defaults


def _brought_along(name: str, options: dict[str, Any], chosen: Any) -> dict[str, Any]:
    """Defaults of the lists that a choice brings along: the first choice of each."""
    choices = [choice for choice in options.get("options", ()) if isinstance(choice, dict) and choice["key"] == chosen]
    lists = {inner: more for each in choices for inner, (_, more) in declared_inputs({"input": each["inputs"]}).items()}
    return {f"{name}.{inner}": more["options"][0]["key"] for inner, more in lists.items()}


def to_graph(name: str, prompt: Prompt, object_info: dict[str, Any]) -> dict[str, Any]:
    """A prompt in the web page's format, its nodes in groups, with a note.

    Most of it is in a subgraph, but for the included model: its five nodes show how the ways to sample differ.
    """
    content = flat_graph(prompt, object_info)
    files, folders = _named(prompt, "models"), _named(prompt, "folders")
    values: list[str] = []
    if files or folders:
        content["last_node_id"] += 1
        workflow_subgraph.fold(content, content["last_node_id"], workflow_subgraph.inner_ids(content))
        values = [slot["name"] for slot in content["nodes"][-1]["inputs"] if "widget" in slot]
    content["last_node_id"] += 1
    left = workflow_note.WIDTH + workflow_layout.GAP
    content["groups"] = workflow_layout.place(content["nodes"], content["links"], left)
    kinds = {entry["class_type"] for entry in prompt.values()}
    text = workflow_note.text(name, kinds, files=files, folders=folders, comfyui=_comfyui(prompt), values=values)
    content["nodes"].append(workflow_note.node(content["last_node_id"], text))
    return content


def flat_graph(prompt: Prompt, object_info: dict[str, Any]) -> dict[str, Any]:
    """A prompt in the web page's format, its nodes without places."""
    links: list[list[Any]] = []
    nodes = [_node(int(key), entry, object_info[entry["class_type"]], links) for key, entry in prompt.items()]
    by_id = {node["id"]: node for node in nodes}
    for number, source, output, *_ in links:
        by_id[source]["outputs"][output]["links"].append(number)
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(prompt, sort_keys=True))),
        "revision": 0,
        "last_node_id": max(node["id"] for node in nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _node(node_id: int, entry: Node, info: dict[str, Any], links: list[list[Any]]) -> Node:
    inputs: list[Node] = []
    values: list[Any] = []
    declared = declared_inputs(info)
    for name, (kind, options) in declared.items():
        value = entry["inputs"].get(name)
        if is_widget(kind, options):
            if name in _later_options(entry, declared):
                continue
            link = None
            if isinstance(value, list):  # from another node; the page keeps a value in case that the link goes
                link, value = _linked(value, node_id, len(inputs), kind, links), options.get("default", "")
            value = options.get("default") if value is None else value
            inputs.append({"name": name, "type": kind, "widget": {"name": name}, "link": link})
            values += [value, "fixed"] if options.get("control_after_generate") else [value]
            continue
        slot: Node = {"name": name, "type": kind, "link": None}
        if value is None:
            slot["shape"] = 7  # how the page draws an input that is optional
        else:
            slot["link"] = _linked(value, node_id, len(inputs), kind, links)
        inputs.append(slot)
    node = {"id": node_id, "type": entry["class_type"], "flags": {}, "mode": 0, "inputs": inputs}
    # Newer versions give nodes that save files outputs, which no workflow uses.
    outputs = () if info["output_node"] else zip(info["output"], info["output_name"], strict=True)
    node["outputs"] = [{"name": name, "type": kind, "links": []} for kind, name in outputs]
    node["properties"] = {"Node name for S&R": entry["class_type"]}
    node["widgets_values"] = values
    if models := entry.get("_meta", {}).get("models"):
        node["properties"]["models"] = models
    if title := entry.get("_meta", {}).get("title"):
        node["title"] = title
    return node


def _linked(source: list[Any], node_id: int, slot: int, kind: str, links: list[list[Any]]) -> int:
    """Add a link from another node's output to an input; return its number."""
    links.append([len(links) + 1, int(source[0]), source[1], node_id, slot, kind])
    return len(links)


def _later_options(entry: Node, declared: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """The inputs after the last one that the prompt sets. The page gives them the default values of its version."""
    names = list(declared)
    return names[max((names.index(name) for name in entry["inputs"]), default=-1) + 1 :]
