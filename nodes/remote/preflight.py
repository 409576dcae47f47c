"""The loader's checks of the queued prompt: what would fail later is refused before weights load and steps run."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.single_file import SingleFile
from ...parallel_backend.errors import InvalidRequest
from ..backend.connection import Handle
from ..bridges.bridge import BackendText, CoreText
from ..bridges.refusals import check_branches, layers_unavailable
from ..families.registry import bridge_class
from .loop_choice import check_sampler_for_layout
from .patcher import is_cfg_pp

Prompt = Mapping[str, Mapping[str, Any]]
GUIDED = ("KSampler", "KSamplerAdvanced", "ParallelSampler", "SamplerCustom", "CFGGuider")
"""Nodes for which ComfyUI skips the negative prompt at a ``cfg`` of 1."""
REPLACING = ("PerturbedAttentionGuidance",)
"""Nodes that replace attention only in the middle of sampling."""
MODEL_OUTPUT, CLIP_OUTPUT, VAE_OUTPUT = 0, 1, 2
"""Output slots of the loader."""
OPTIONAL_OUTPUTS = {
    CLIP_OUTPUT: ("text_encoder", "text encoder", "Load CLIP"),
    VAE_OUTPUT: ("vae", "VAE", "Load VAE"),
}
"""Outputs that a checkpoint may lack: component, readable name, and the native node to use instead."""


def check_prompt(prompt: Prompt, node_id: str, handle: Handle) -> None:
    """Refuse nodes that use an unsupported output, replace attention, or leave ``cfg`` ranks without work.

    Raises:
        InvalidRequest: there is such a node. The message names the problem.
    """
    cfg_pp = _names_cfg_pp(prompt)
    for each in executed_nodes(prompt):
        kind, inputs = prompt[each]["class_type"], prompt[each]["inputs"]
        for output in OPTIONAL_OUTPUTS:
            if [node_id, output] in inputs.values():
                check_output(handle.checkpoint, output)
        if kind in REPLACING and _model_source(prompt, inputs, node_id) == [node_id, MODEL_OUTPUT]:
            raise layers_unavailable(f"{kind} replaces attention in the model")
        source = _model_source(prompt, inputs, node_id, through="ModelSampling")
        if source == [node_id, MODEL_OUTPUT] and kind == "ParallelSampler":
            check_sampler_for_layout(inputs.get("sampler_name"), handle.spec.layout)
        if source == [node_id, MODEL_OUTPUT] and kind in GUIDED and inputs.get("cfg") == 1.0 and not cfg_pp:
            check_branches(handle.spec.layout, 1)


def _names_cfg_pp(prompt: Prompt) -> bool:
    """Whether a node chooses a CFG++ sampler, which needs the negative prompt at a ``cfg`` of 1, too."""
    values = (value for node in prompt.values() for value in [node["class_type"], *node["inputs"].values()])
    return any(isinstance(value, str) and is_cfg_pp(value) for value in values)


def _model_source(prompt: Prompt, inputs: Mapping[str, Any], node_id: str, through: str = "") -> Any:
    """Follow a node's model input back to the loader.

    Args:
        through: only nodes whose class begins with this are followed.

    Returns:
        The last link that was followed. None in a cycle.
    """
    for _ in prompt:
        link = inputs.get("model")
        if not isinstance(link, list) or link[0] == node_id or link[0] not in prompt:
            return link
        if not prompt[link[0]]["class_type"].startswith(through):
            return link
        inputs = prompt[link[0]]["inputs"]
    return None


def check_output(checkpoint: Checkpoint, output: int) -> None:
    """Refuse the CLIP or VAE output of a checkpoint that lacks the component or has an unsupported one.

    Raises:
        InvalidRequest: the output is refused. The message advises another loader.
    """
    component, name, native_loader = OPTIONAL_OUTPUTS[output]
    if output == CLIP_OUTPUT and isinstance(checkpoint, SingleFile) and checkpoint.holds_text_encoders:
        return
    try:
        checkpoint.check_known(component)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; load one with ComfyUI's {native_loader} node instead") from error
    bridge, class_name = bridge_class(checkpoint.components["transformer"]), checkpoint.components.get(component)
    if class_name is None:
        if output == CLIP_OUTPUT and isinstance(bridge.text, CoreText) and not bridge.text.components:
            raise InvalidRequest(f"{checkpoint.name} takes a class, not a prompt: use Parallel Class Label")
        raise InvalidRequest(f"{checkpoint.name} has no {name}; load one with ComfyUI's {native_loader} node instead")
    if output == CLIP_OUTPUT and isinstance(bridge.text, CoreText):
        bridge.text.check(checkpoint)
        return
    if output == CLIP_OUTPUT and isinstance(bridge.text, BackendText):
        supported: tuple[str, ...] = (bridge.text.encoder,)
    else:
        supported = bridge.vaes
    if class_name not in supported:
        others = f", only {' or '.join(supported)}" if supported else ""
        raise InvalidRequest(
            f"{checkpoint.name}: {component} {class_name} is not supported{others}; "
            f"load one with ComfyUI's {native_loader} node instead"
        )
    try:
        checkpoint.stored(component)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; or load one with ComfyUI's {native_loader} node instead") from error


def executed_nodes(prompt: Prompt, also: Iterable[str] = ()) -> Iterator[str]:
    """Yield every node that an output node needs, or one of the nodes ``also``."""
    import nodes  # ComfyUI's module of this name

    pending = [*also]
    pending += [
        node_id
        for node_id, node in prompt.items()
        if getattr(nodes.NODE_CLASS_MAPPINGS.get(node["class_type"]), "OUTPUT_NODE", False)
    ]
    seen: set[str] = set()
    while pending:
        node_id = pending.pop()
        if not isinstance(node_id, str) or node_id in seen or node_id not in prompt:
            continue
        seen.add(node_id)
        yield node_id
        values = prompt[node_id]["inputs"].values()
        pending += [value[0] for value in values if isinstance(value, list) and len(value) == 2]
