"""Random LoRA files in every way of naming layers that ComfyUI knows for a model."""

from collections.abc import Callable, Mapping
from typing import Any

import comfy.lora
import comfy.sd
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

    Only linear layers are listed, and not those of timestep embedders: Z-Image's is narrower in ComfyUI's tiny models.
    """
    module = native.model
    linear = {f"{name}.weight" for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)}
    found: dict[str, dict[str, Any]] = {}
    for name, target in comfy.lora.model_lora_keys_unet(module, {}).items():
        weight = target if isinstance(target, str) else target[0]
        if weight in linear and "t_embedder" not in weight:
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


def other(native: Any, kind: str, *, seed: int) -> Lora:
    """Return a file of another kind, in ComfyUI's generic names: its own changes of every linear layer.

    Args:
        native: ComfyUI's own model.
        kind: ``dora``, ``lokr``, ``loha``, ``diff`` (of weights and biases), or ``set``.
        seed: of the random numbers.
    """
    random = _random(seed)
    weights = native.model.state_dict()
    lora: Lora = {}
    for name, target in targets(native)["diffusion_model."].items():
        if isinstance(target, str):
            lora |= {f"{name}.{end}": tensor for end, tensor in _KINDS[kind](weights[target], random).items()}
            if kind == "diff" and (bias := weights.get(target.replace(".weight", ".bias"))) is not None:
                lora[f"{name}.diff_b"] = random(*bias.shape) * 0.1
    return lora


def text(module: torch.nn.Module, kind: str, *, seed: int) -> Lora:
    """Return a file that changes every linear layer of a CLIP's module: a LoRA, or a DoRA."""
    random = _random(seed)
    weights = module.state_dict()
    lora: Lora = {}
    for name, each in module.named_modules():
        if isinstance(each, torch.nn.Linear):
            factors = _dora(weights[f"{name}.weight"], random)
            kept = {end: tensor for end, tensor in factors.items() if kind == "dora" or end != "dora_scale"}
            lora |= {f"text_encoders.{name}.{end}": tensor for end, tensor in kept.items()}
    return lora


def _dora(weight: Tensor, random: Callable[..., Tensor]) -> Lora:
    rows, columns = weight.shape
    norms = weight.norm(dim=1, keepdim=True) * (1.0 + 0.2 * random(rows, 1).abs())
    return {
        "lora_up.weight": random(rows, 3) * 0.3,
        "lora_down.weight": random(3, columns) * columns**-0.5,
        "alpha": torch.tensor(2.0),
        "dora_scale": norms,
    }


def _lokr(weight: Tensor, random: Callable[..., Tensor]) -> Lora:
    rows, columns = weight.shape
    small = 2 if rows % 2 == 0 and columns % 2 == 0 else 1
    return {"lokr_w1": random(small, small) * 0.3, "lokr_w2": random(rows // small, columns // small) * columns**-0.5}


def _loha(weight: Tensor, random: Callable[..., Tensor]) -> Lora:
    rows, columns = weight.shape
    shapes = {"w1_a": (rows, 2), "w1_b": (2, columns), "w2_a": (rows, 2), "w2_b": (2, columns)}
    return {f"hada_{name}": random(*shape) * columns**-0.25 * 0.5 for name, shape in shapes.items()}


_KINDS: dict[str, Callable[[Tensor, Callable[..., Tensor]], Lora]] = {
    "dora": _dora,
    "lokr": _lokr,
    "loha": _loha,
    "diff": lambda weight, random: {"diff": random(*weight.shape) * weight.shape[1] ** -0.5 * 0.3},
    "set": lambda weight, random: {"set_weight": random(*weight.shape) * weight.shape[1] ** -0.5},
}
KINDS = tuple(_KINDS)
"""What ``other`` makes."""


def on_model(model: Any, *changes: tuple[Lora, float]) -> Any:
    """Return a MODEL behind LoraLoaders."""
    for lora, strength in changes:
        model, _ = comfy.sd.load_lora_for_models(model, None, dict(lora), strength, 0.0)
    return model


HAS_BYPASS = hasattr(comfy.sd, "load_bypass_lora_for_models")
"""Whether this version of ComfyUI has LoraLoaderBypass."""


def bypassed(model: Any, lora: Lora, strength: float) -> Any:
    """Return a MODEL behind a LoraLoaderBypass."""
    model, _ = comfy.sd.load_bypass_lora_for_models(model, None, dict(lora), strength, 0.0)
    return model


def options_of(case: Any) -> dict[str, Any]:
    """Return the sampler's inputs for a case."""
    return {
        "positive": case.conditioning(1),
        "negative": case.conditioning(2, shorter=case.shorter),
        "cfg": case.cfg,
    }
