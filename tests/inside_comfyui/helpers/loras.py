"""Random LoRA files in every way of naming layers that ComfyUI knows for a model."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import comfy.lora
import torch
from torch import Tensor

Lora = dict[str, Tensor]
_DIALECTS = (
    "lora_unet_", "lora_transformer_", "lycoris_", "unet.base_model.model.", "base_model.model.", "transformer.",
    "diffusion_model.", "unet.",
)  # fmt: skip
"""Beginnings of layers' names, those that begin with another one first."""
_FORMS = (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"))
"""Ends of the factors' names."""


def targets(native: Any) -> dict[str, dict[str, Any]]:
    """Return by dialect what ComfyUI's names of layers stand for: a weight's name, or that with an offset.

    Only linear layers are listed.
    """
    module = native.model
    linear = {f"{name}.weight" for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)}
    found: dict[str, dict[str, Any]] = {}
    for name, target in comfy.lora.model_lora_keys_unet(module, {}).items():
        weight = target if isinstance(target, str) else target[0]
        if weight in linear:
            dialect = next((start for start in _DIALECTS if name.startswith(start)), "")
            found.setdefault(dialect, {})[name] = target
    return found


def plain(native: Any, dialect: str, *, rank: int, seed: int, alpha: float | None = None) -> Lora:
    """Return a LoRA that changes every linear layer that a dialect names, by about as much as its weights are."""
    random = _random(seed)
    shapes = {name: tensor.shape for name, tensor in native.model.state_dict().items()}
    up, down = _FORMS[seed % len(_FORMS)]
    lora: Lora = {}
    for name, target in targets(native)[dialect].items():
        rows, columns = _shape(target, shapes)
        lora[f"{name}.{up}"] = random(rows, rank) * 0.3
        lora[f"{name}.{down}"] = random(rank, columns) * columns**-0.5
        if alpha is not None:
            lora[f"{name}.alpha"] = torch.tensor(alpha)
    return lora


def _shape(target: Any, shapes: Mapping[str, torch.Size]) -> tuple[int, int]:
    """Return the rows and columns of what a name stands for."""
    if isinstance(target, str):
        rows, columns = shapes[target]
        return rows, columns
    rows, columns = shapes[target[0]]
    offset = target[1]
    return (rows if offset is None else offset[2]), columns


def _random(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def describe(dialect: str) -> str:
    """Return a dialect's name for a test's id."""
    return re.sub(r"\W+$", "", dialect) or "plain"
