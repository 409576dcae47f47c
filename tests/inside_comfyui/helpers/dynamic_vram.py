"""ComfyUI as it is with dynamic VRAM, its default with an NVIDIA GPU, as far as a CPU allows.

Layers get their weights when a file is loaded. The library that moves weights and maps files needs a GPU.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.utils
import safetensors

HAS_IT = hasattr(comfy.model_patcher, "CoreModelPatcher")


def start() -> None:
    """Do what ComfyUI's ``main.py`` does where it enables dynamic VRAM, if this ComfyUI has it."""
    if not HAS_IT:
        return
    import comfy.memory_management
    import comfy_aimdo.model_vbar

    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True
    comfy.utils.load_safetensors = _load_safetensors
    comfy_aimdo.model_vbar.vbars_analyze = lambda device: 0


def _load_safetensors(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextlib.contextmanager
def off() -> Iterator[None]:
    """New layers have weights from the start, in their own dtype. It also decorates functions."""
    if not HAS_IT:
        yield
        return
    import comfy.memory_management

    before = comfy.memory_management.aimdo_enabled
    comfy.memory_management.aimdo_enabled = False
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = before
