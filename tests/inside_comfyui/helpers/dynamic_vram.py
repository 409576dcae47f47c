"""ComfyUI as it is with dynamic VRAM, its default with an NVIDIA GPU, as far as the CPU allows.

Files are mapped, and layers get their weights when a file is loaded. The library that moves weights needs a GPU.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import comfy
import safetensors

VARIABLE = "PARALLEL_DIT_DYNAMIC_VRAM"
"""The environment variable that asks for it."""
P, T = ParamSpec("P"), TypeVar("T")


def start() -> None:
    """Do what ComfyUI's ``main.py`` does where it enables dynamic VRAM."""
    import comfy.memory_management
    import comfy.model_patcher
    import comfy.utils
    import comfy_aimdo.model_vbar

    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True
    comfy.utils.load_safetensors = _load_safetensors
    comfy_aimdo.model_vbar.vbars_analyze = lambda device: 0


def _load_safetensors(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def with_weights(make: Callable[P, T]) -> Callable[P, T]:
    """Let a function's new layers have weights from the start, which a test then replaces."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        state = getattr(comfy, "memory_management", SimpleNamespace())  # an older ComfyUI has none
        before = getattr(state, "aimdo_enabled", False)
        state.aimdo_enabled = False
        try:
            return make(*args, **kwargs)
        finally:
            state.aimdo_enabled = before

    return made
