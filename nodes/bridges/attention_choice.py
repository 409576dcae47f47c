"""How a node lets a MODEL attend, whose layers run in the ranks: a kernel of its choice, or not to all tokens."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.ldm.modules.attention
from comfy.model_patcher import ModelPatcher

OVERRIDE = "optimized_attention_override"
"""The key of ``transformer_options`` with a node's choice."""
SPARSE, _SPARSE_FILE = "BlockSparseAttention", "nodes_sparse_attention"
"""ComfyUI's node for sparse attention, which 0.34.0 and newer have, and the file of its functions."""
_KERNELS = {"attention_pytorch": "pytorch attention", "attention_comfy_kitchen_int8": "comfy kitchen attention"}
"""What ModelAttentionBackend chooses from, by ComfyUI's functions. Older versions lack the second one."""


def chosen_kernel(override: Any) -> str:
    """Return which kernel ComfyUI's ModelAttentionBackend chose, or nothing for another function.

    Each computes what the ranks compute, in a kernel of their own: comfy-kitchen's rounds to 8-bit numbers.

    Args:
        override: what is at ``OVERRIDE``: a function that ``set_model_optimized_attention`` makes around another.
    """
    if getattr(override, "__module__", None) != ModelPatcher.__module__:
        return ""
    chosen = inspect.getclosurevars(override).nonlocals.get("optimized_attention")
    functions = {title: getattr(comfy.ldm.modules.attention, name, None) for name, title in _KERNELS.items()}
    return next((title for title, function in functions.items() if chosen is not None and chosen is function), "")


def is_sparse(transformer_options: Mapping[str, Any]) -> bool:
    """Whether ComfyUI's node ``SPARSE`` has put a function of its own here, for all layers or for blocks."""
    return any(_module(function).endswith(_SPARSE_FILE) for function in _functions(transformer_options))


def _functions(transformer_options: Mapping[str, Any]) -> Iterator[Any]:
    yield transformer_options.get(OVERRIDE)
    for replaced in (transformer_options.get("patches_replace") or {}).values():
        yield from replaced.values()


def _module(function: Any) -> str:
    return str(getattr(function, "__module__", ""))
