"""A prompt that grows node by node, and the same prompt for ComfyUI alone."""

from collections.abc import Mapping
from typing import Any

from helpers.executor import Prompt
from helpers.node_inputs import VALUES

Link = list[Any]
"""A node's id and the place of its output."""
ALONE = {"ParallelSampler": "KSampler", "ParallelLoader": "UNETLoader"}
"""ComfyUI's node in the place of ours."""


class Graph:
    """Nodes that are added to a prompt.

    Args:
        kinds: ComfyUI's nodes and ours, by their ids.

    Attributes:
        prompt: the nodes.
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self.kinds = kinds
        self.prompt: Prompt = {}

    def add(self, class_type: str, **inputs: Any) -> Link:
        """Add a node and return its first output. Inputs that are not given have values with an effect, or defaults."""
        node_id = str(len(self.prompt) + 1)
        required = self.kinds[class_type].INPUT_TYPES()["required"]
        defaults = {name: _default(*declared) for name, declared in required.items() if name not in inputs}
        known = {name: value for name, value in VALUES.get(class_type, {}).items() if name in required}
        self.prompt[node_id] = {"class_type": class_type, "inputs": {**defaults, **known, **inputs}}
        return [node_id, 0]


def _default(kind: Any, options: Mapping[str, Any] | None = None) -> Any:
    choices = kind if isinstance(kind, list | tuple) else (options or {}).get("options")
    return (options or {}).get("default", choices[0] if choices else None)


def alone(prompt: Prompt) -> Prompt:
    """Return the prompt with ComfyUI's nodes in the place of ours, and without those that it lacks."""
    behind = {key: node["inputs"]["model"] for key, node in prompt.items() if node["class_type"] == "ParallelModel"}

    def native(value: Any) -> Any:
        return behind.get(value[0], value) if isinstance(value, list) and len(value) == 2 else value

    found: Prompt = {}
    for key, node in prompt.items():
        kind, inputs = node["class_type"], {name: native(value) for name, value in node["inputs"].items()}
        if kind == "ParallelLoader":
            file = inputs["model_name"].partition("/")[2]
            inputs = {"unet_name": file, "weight_dtype": "default"}
        if kind not in ("ParallelModel", "ParallelLayout"):
            found[key] = {"class_type": ALONE.get(kind, kind), "inputs": inputs}
    return found
