"""The blueprint that the page lists among ComfyUI's own: Parallel Model and Parallel VAE as one node.

Whoever adds it to a workflow writes the GPUs once, and bypasses both at once.
"""

import json
from typing import Any

from scripts import workflow_subgraph, workflows
from scripts.comfy_api import Prompt
from scripts.comfy_paths import ROOT

NAME = "Model and VAE on several GPUs"
FILE = ROOT / "subgraphs" / f"{NAME}.json"
"""All supported versions of ComfyUI list the files of this folder."""
DESCRIPTION = (
    "Put it between the loaders of a model and its VAE and what uses them. "
    "Bypassed (Ctrl+B), it leaves everything to ComfyUI and one GPU."
)
OURS = {1, 2}
SHOWN = {"devices": "devices", "attention": "attention"}
MODEL = {"model": ["3", 0], "devices": "all", "layout": ["5", 0], "attention": "auto"}
AROUND: Prompt = {
    "1": {"class_type": "ParallelModel", "inputs": MODEL},
    "2": {"class_type": "ParallelVAE", "inputs": {"vae": ["4", 0], "devices": "all"}},
    "3": {"class_type": "UNETLoader", "inputs": {}},
    "4": {"class_type": "VAELoader", "inputs": {}},
    "5": {"class_type": "ParallelLayout", "inputs": {}},
    "6": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}},
    "7": {"class_type": "VAEDecode", "inputs": {"vae": ["2", 0]}},
}
"""Both nodes, and what is on the other ends of their links, which the blueprint leaves out."""


def graph(object_info: dict[str, Any]) -> dict[str, Any]:
    """The blueprint in the page's format: a workflow whose only node stands for the subgraph."""
    content = workflows.flat_graph(AROUND, object_info)
    number = content["last_node_id"] = max(OURS) + 1
    workflow_subgraph.fold(content, number, OURS, title=NAME, shown=SHOWN)
    node = content["nodes"][-1]
    for slot in node["inputs"]:
        slot["link"] = None
    for slot in node["outputs"]:
        slot["links"] = []
    content |= {"nodes": [node], "links": [], "last_link_id": 0}
    node |= {"pos": [0, 0], "size": [340, 170], "order": 0}
    content["extra"] = {"BlueprintDescription": DESCRIPTION}
    content["definitions"]["subgraphs"][0] |= {"category": "Parallel DiT", "description": DESCRIPTION}
    return content


def read() -> dict[str, Any]:
    """The file of the blueprint."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content
