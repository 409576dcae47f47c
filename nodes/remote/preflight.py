"""What the queued prompt shows will fail later is refused by the loader, before weights load and steps are lost."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ..backend.connection import Handle
from ..bridges.bridge import BackendText, CoreText
from ..bridges.refusals import check_branches, without_layers
from ..families.registry import BRIDGES

Prompt = Mapping[str, Mapping[str, Any]]
GUIDED = ("KSampler", "KSamplerAdvanced", "ParallelSampler", "SamplerCustom", "CFGGuider")
"""Nodes whose ``cfg`` of 1 means that core leaves the negative prompt out."""
SKIPPING = ("SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "SkipLayerGuidanceSD3", "PerturbedAttentionGuidance")
"""Nodes that patch layers in the middle of sampling alone."""
PARTS = {1: ("text_encoder", "text encoder", "Load CLIP"), 2: ("vae", "VAE", "Load VAE")}
"""The loader's outputs that a checkpoint may lack: component, name, and the node of ComfyUI's own to use instead."""


def check_use(prompt: Prompt, node_id: str, handle: Handle) -> None:
    """Refuse what the executed nodes show: an output that cannot be used, layers skipped, ``cfg`` ranks without work.

    Raises:
        InvalidRequest: names it.
    """
    for kind, inputs in _executed(prompt):
        for output in PARTS:
            if [node_id, output] in inputs.values():
                check_part(handle.checkpoint, output)
        if kind in SKIPPING and _source(prompt, inputs, node_id) == [node_id, 0]:
            raise without_layers(f"{kind} skips or replaces layers of the model")
        scheduled = _source(prompt, inputs, node_id, through="ModelSampling") == [node_id, 0]
        if scheduled and kind in GUIDED and inputs.get("cfg") == 1.0:
            check_branches(handle.spec.layout, 1)


def _source(prompt: Prompt, inputs: Mapping[str, Any], node_id: str, through: str = "") -> Any:
    """The link that a node's model comes from, back to the loader through the nodes whose names begin so."""
    for _ in prompt:
        link = inputs.get("model")
        if not isinstance(link, list) or link[0] == node_id or link[0] not in prompt:
            return link
        if not prompt[link[0]]["class_type"].startswith(through):
            return link
        inputs = prompt[link[0]]["inputs"]
    return None


def check_part(checkpoint: Checkpoint, output: int) -> None:
    """Refuse the text encoder (1) or the VAE (2) of a checkpoint that has none, or one that cannot be run.

    Raises:
        InvalidRequest: advises another loader.
    """
    component, name, instead = PARTS[output]
    bridge, found = BRIDGES[checkpoint.components["transformer"]], checkpoint.components.get(component)
    if found is None:
        if output == 1 and isinstance(bridge.text, CoreText) and not bridge.text.components:
            raise InvalidRequest(f"{checkpoint.path.name} takes no prompt but a class: use Parallel Class Label")
        raise InvalidRequest(f"{checkpoint.path.name} has no {name}; load one with ComfyUI's {instead} node instead")
    if output == 1 and isinstance(bridge.text, CoreText):
        bridge.text.check(checkpoint)
        return
    known = (bridge.text.encoder,) if output == 1 and isinstance(bridge.text, BackendText) else bridge.vaes
    if found not in known:
        raise InvalidRequest(
            f"{checkpoint.path.name}: {component} {found} is not supported, only {' or '.join(known)}; "
            f"load one with ComfyUI's {instead} node instead"
        )


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
