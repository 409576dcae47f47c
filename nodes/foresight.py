"""What the queued prompt shows will fail later is refused by the loader, before weights load and steps are lost."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..parallel_backend.checkpoint import Checkpoint
from ..parallel_backend.errors import InvalidRequest
from .connection import Handle
from .families.bridge import CoreText
from .families.registry import BRIDGES
from .guards import check_branches

Prompt = Mapping[str, Mapping[str, Any]]
GUIDED = ("KSampler", "KSamplerAdvanced", "ParallelSampler", "SamplerCustom", "CFGGuider")
"""Nodes whose ``cfg`` of 1 means that core leaves the negative prompt out."""
PARTS = {1: ("text_encoder", "text encoder", "Load CLIP"), 2: ("vae", "VAE", "Load VAE")}
"""The loader's outputs that a checkpoint may lack: component, name, and the node of ComfyUI's own to use instead."""


def check_use(prompt: Prompt, node_id: str, handle: Handle) -> None:
    """Refuse an output that is used and not there, and a ``cfg`` layout at a sampler without guidance.

    Raises:
        InvalidRequest: names it.
    """
    for kind, inputs in _executed(prompt):
        for output in PARTS:
            if [node_id, output] in inputs.values():
                check_part(handle.checkpoint, output)
        if kind in GUIDED and inputs.get("cfg") == 1.0 and _source(prompt, inputs) == [node_id, 0]:
            check_branches(handle.spec.layout, 1)


def _source(prompt: Prompt, inputs: Mapping[str, Any]) -> Any:
    """The link that a sampler's model comes from, through the nodes that only change the schedule."""
    for _ in prompt:
        link = inputs.get("model")
        node = prompt.get(link[0]) if isinstance(link, list) else None
        if node is None or not node["class_type"].startswith("ModelSampling"):
            return link
        inputs = node["inputs"]
    return None


def check_part(checkpoint: Checkpoint, output: int) -> None:
    """Refuse the text encoder (1) or the VAE (2) of a checkpoint that has none.

    Raises:
        InvalidRequest: advises another loader.
    """
    component, name, instead = PARTS[output]
    if component not in checkpoint.components:
        text = BRIDGES[checkpoint.components["transformer"]].text
        if output == 1 and isinstance(text, CoreText) and not text.components:
            raise InvalidRequest(f"{checkpoint.path.name} takes no prompt but a class: use Parallel Class Label")
        raise InvalidRequest(f"{checkpoint.path.name} has no {name}; load one with ComfyUI's {instead} node instead")


def _executed(prompt: Prompt) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Class and inputs of every node that an output node needs."""
    import nodes  # ComfyUI's

    wanted = [
        node_id
        for node_id, node in prompt.items()
        if getattr(nodes.NODE_CLASS_MAPPINGS.get(node["class_type"]), "OUTPUT_NODE", False)
    ]
    seen: set[str] = set()
    while wanted:
        node_id = wanted.pop()
        if not isinstance(node_id, str) or node_id in seen or node_id not in prompt:
            continue
        seen.add(node_id)
        inputs = prompt[node_id]["inputs"]
        yield prompt[node_id]["class_type"], inputs
        wanted += [value[0] for value in inputs.values() if isinstance(value, list) and len(value) == 2]
