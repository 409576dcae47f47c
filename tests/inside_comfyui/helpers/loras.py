"""Random LoRA files in every way of naming layers that ComfyUI knows for a model."""

import math
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
_FORMS = (
    (".lora_up.weight", ".lora_down.weight"),
    (".lora_B.weight", ".lora_A.weight"),
    ("_lora.up.weight", "_lora.down.weight"),
    (".lora.up.weight", ".lora.down.weight"),
    (".lora_B", ".lora_A"),
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
    (".lora_B.default.weight", ".lora_A.default.weight"),
)
"""Ends of the factors' names: all that ``comfy.weight_adapter.lora`` reads."""


def targets(native: Any) -> dict[str, dict[str, Any]]:
    """Return by dialect what ComfyUI's names of layers stand for: a weight's name, or that with an offset.

    Linear layers and convolutions are listed, but not Z-Image's timestep embedder, which is narrower in ComfyUI's tiny
    models.
    """
    module = native.model
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    narrow = "t_embedder" if "Lumina" in type(module).__name__ else ()
    layers = {
        f"{name}.weight"
        for name, each in module.named_modules()
        if isinstance(each, kinds) and not (narrow and narrow in name)
    }
    found: dict[str, dict[str, Any]] = {}
    for name, target in comfy.lora.model_lora_keys_unet(module, {}).items():
        weight = target if isinstance(target, str) else target[0]
        if weight in layers:
            dialect = next((start for start in _DIALECTS if name.startswith(start)), "")
            found.setdefault(dialect, {})[name] = target
    return found


def plain(
    native: Any, dialect: str, *, rank: int, seed: int, alpha: float | None = None, form: int | None = None
) -> Lora:
    """Return a LoRA that changes every layer that a dialect names, by about as much as its weights are.

    Args:
        native: ComfyUI's own model.
        dialect: one of ``targets``.
        rank: of the factors.
        seed: of the random numbers.
        alpha: the file's.
        form: which of ``_FORMS``; one that follows from the seed, if it is None.
    """
    random = _random(seed)
    shapes = {name: tensor.shape for name, tensor in native.model.state_dict().items()}
    up, down = _FORMS[(seed if form is None else form) % len(_FORMS)]
    lora: Lora = {}
    for name, target in targets(native)[dialect].items():
        rows, *columns = _shape(target, shapes)
        lora[f"{name}{up}"] = random(rows, rank, *[1] * (len(columns) - 1)) * 0.3
        lora[f"{name}{down}"] = random(rank, *columns) * math.prod(columns) ** -0.5
        if alpha is not None:
            lora[f"{name}.alpha"] = torch.tensor(alpha)
    return lora


def _shape(target: Any, shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
    """Return the rows and columns of what a name stands for; of a convolution, the kernel's size, too."""
    if isinstance(target, str):
        return tuple(shapes[target])
    rows, columns = shapes[target[0]]
    offset = target[1]
    return (rows if offset is None else offset[2]), columns


def wan_fun(native: Any, *, rank: int, seed: int) -> Lora:
    """Return a LoRA in the names of Wan Fun."""
    found = plain(native, "lora_unet_", rank=rank, seed=seed, form=0)
    return {name.replace("lora_unet_", "lora_unet__", 1): tensor for name, tensor in found.items()}


def uso(native: Any, *, rank: int, seed: int) -> Lora:
    """Return a LoRA for the layers of Flux' blocks in the names of USO."""
    names = {
        "txt_attn.qkv": "qkv_lora2", "img_attn.qkv": "qkv_lora1", "img_attn.proj": "proj_lora1",
        "txt_attn.proj": "proj_lora2", "linear1_qkv": "qkv_lora", "linear2": "proj_lora",
    }  # fmt: skip
    random, lora = _random(seed), dict[str, Tensor]()
    shapes = {name: tensor.shape for name, tensor in native.model.state_dict().items()}
    for name, target in targets(native)["diffusion_model."].items():
        block, theirs = next(
            ((name.removesuffix(end), new) for end, new in names.items() if name.endswith(end)), ("", "")
        )
        if theirs:
            rows, columns = _shape(target, shapes)
            start = f"{block.removeprefix('diffusion_model.')}processor.{theirs}"
            lora |= {
                f"{start}.up.weight": random(rows, rank) * 0.3,
                f"{start}.down.weight": random(rank, columns) * 0.1,
            }
    # ComfyUI knows the names by the last blocks of the published model.
    last = ("single_blocks.37.processor.qkv_lora.up.weight", "double_blocks.18.processor.qkv_lora2.up.weight")
    return lora | {name: torch.ones(1, 1) for name in last}


def bfl_control(native: Any, *, rank: int, seed: int) -> Lora:
    """Return a LoRA in the names of Flux' control LoRAs, with biases and norms, of the model's own input size."""
    random, start = _random(seed), "diffusion_model."
    weights = native.model.state_dict()
    found = plain(native, start, rank=rank, seed=seed, form=1)
    lora = {name.removeprefix(start): tensor for name, tensor in found.items() if "linear1_qkv" not in name}
    for name in [name for name in lora if name.endswith("lora_B.weight")]:
        bias = weights.get(f"{start}{name.removesuffix('lora_B.weight')}bias")
        if bias is not None:
            lora[name.replace(".weight", ".bias")] = random(*bias.shape) * 0.1
    for name in [name for name in weights if name.endswith(("_norm.scale", "_norm.weight"))]:
        scale = f"{name.removeprefix(start).rpartition('.')[0]}.scale"
        lora[scale] = 1.0 + 0.2 * random(*weights[name].shape)
    return lora


CONVERTED = {"wan t2v": (wan_fun,), "flux dev": (uso, bfl_control)}
"""By case, the names that ComfyUI converts before it looks for layers."""


def _random(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def other(native: Any, kind: str, *, seed: int) -> Lora:
    """Return a file of another kind, in ComfyUI's generic names: its own changes of every linear layer.

    Those of differences and replacements are of every layer.

    Args:
        native: ComfyUI's own model.
        kind: ``dora``, ``lokr``, ``loha``, ``oft``, ``diff`` (of weights and biases), or ``set``.
        seed: of the random numbers.
    """
    random = _random(seed)
    weights = native.model.state_dict()
    lora: Lora = {}
    for name, target in targets(native)["diffusion_model."].items():
        if isinstance(target, str) and (kind in ("diff", "set") or weights[target].ndim == 2):
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
    "oft": lambda weight, random: {"oft_blocks": random(len(weight) // 4, 4, 4) * 0.3},
    "diff": lambda weight, random: {"diff": random(*weight.shape) * weight[0].numel() ** -0.5 * 0.3},
    "set": lambda weight, random: {"set_weight": random(*weight.shape) * weight[0].numel() ** -0.5},
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
