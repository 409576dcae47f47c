"""The node that ComfyUI is executing, for messages that name what the user chose in it."""

import sys
from typing import Any

from comfy_execution.utils import get_executing_context


def executing_lora() -> str:
    """Return the name of the LoRA that the node being executed loads, or words that stand for it."""
    names = [value for key, value in _inputs().items() if "lora" in key and isinstance(value, str)]
    return names[0] if names else "the LoRA"


def _inputs() -> dict[str, Any]:
    """Return the inputs of the node that is being executed; nothing for a node that another one expanded into."""
    context = get_executing_context()
    # A script has no server, and importing the module would half start one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if context is None or server is None:
        return {}
    for _, prompt_id, prompt, *_ in list(server.prompt_queue.currently_running.values()):
        if prompt_id == context.prompt_id and context.node_id in prompt:
            return dict(prompt[context.node_id]["inputs"])
    return {}
