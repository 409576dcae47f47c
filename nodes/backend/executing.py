"""The node that ComfyUI executes, so that messages can name the user's choices in it."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from comfy_execution.graph_utils import is_link
from comfy_execution.utils import get_executing_context

from .session import current


class _Expanded(dict[str, dict[str, Mapping[str, Any]]]):
    """Inputs of the nodes that ours expanded into, by id, for the running or the last prompt.

    ComfyUI's queue has the original nodes only. Their ids repeat in other prompts.
    """


def remember_expanded(node_id: str, inputs: Mapping[str, Any]) -> None:
    """Record the inputs of a node that ours expands into in the running prompt."""
    context = get_executing_context()
    prompt_id = context.prompt_id if context else ""
    expanded = current().part(_Expanded)
    if prompt_id not in expanded:
        expanded.clear()
    expanded.setdefault(prompt_id, {})[node_id] = inputs


def executing_lora(*, hook: bool = False) -> str:
    """Return the name of the LoRA that the executing node loads.

    If it loads no LoRA, return the names from the nodes whose outputs reach it, or words that stand for them.

    Args:
        hook: whether the LoRA came by a hook. Only nodes for hooks load these.
    """
    context = get_executing_context()
    if context is None:
        return _UNNAMED
    prompt = _prompt(context.prompt_id)
    expanded = current().part(_Expanded).get(context.prompt_id, {}).get(context.node_id)
    own = prompt.get(context.node_id, {}).get("inputs", {}) if expanded is None else expanded
    names = list(_loras(own)) or [
        name
        for node_id in _upstream(prompt, own)
        if not hook or "Hook" in prompt[node_id]["class_type"]
        for name in _loras(prompt[node_id]["inputs"])
    ]
    return " or ".join(dict.fromkeys(names)) or _UNNAMED


_UNNAMED = "the LoRA"


def _loras(inputs: Mapping[str, Any]) -> Iterator[str]:
    yield from (value for key, value in inputs.items() if "lora" in key and isinstance(value, str))


def _upstream(prompt: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the nodes whose outputs reach these inputs, the nearest first."""
    pending, seen = [value[0] for value in inputs.values() if is_link(value)], set[str]()
    while pending:
        node_id = pending.pop(0)
        if node_id not in seen and node_id in prompt:
            seen.add(node_id)
            yield node_id
            pending += [value[0] for value in prompt[node_id]["inputs"].values() if is_link(value)]


def _prompt(prompt_id: str) -> Mapping[str, Any]:
    """Return the nodes of the running prompt; nothing in a script."""
    # A script has no server, and importing the module would half start one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is None:
        return {}
    for _, running_id, prompt, *_ in list(server.prompt_queue.currently_running.values()):
        if running_id == prompt_id:
            nodes: Mapping[str, Any] = prompt
            return nodes
    return {}
