"""An attention kernel that a node chose for a MODEL, whose layers run in the ranks."""

import inspect
from typing import Any

import comfy.ldm.modules.attention
from comfy.model_patcher import ModelPatcher

OVERRIDE = "optimized_attention_override"
"""The key of ``transformer_options`` with a node's choice."""


def chooses_torch(override: Any) -> bool:
    """Whether ComfyUI's ModelAttentionBackend chose torch's attention.

    That computes what the ranks compute, in a kernel of their own.

    Args:
        override: what is at ``OVERRIDE``: a function that ``set_model_optimized_attention`` makes around another.
    """
    if getattr(override, "__module__", None) != ModelPatcher.__module__:
        return False
    chosen = inspect.getclosurevars(override).nonlocals.get("optimized_attention")
    return chosen is comfy.ldm.modules.attention.attention_pytorch
