"""A tiny model of ComfyUI's own class with random weights, and the same weights as a diffusers checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_patcher
import diffusers
import torch
from torch import Tensor

Weights = dict[str, Tensor]
Random = Callable[..., Tensor]
"""Seeded normal numbers of a shape."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of a family.

    Attributes:
        unet: what ComfyUI's detection finds; transformer: diffusers' class; config: of that.
        converted: the native weights under diffusers' names.
        latent: its shape; text: tokens and width; extra: what CONDITIONING holds beside the text.
        cfg: guidance; sampler_name: for KSampler.
    """

    unet: Mapping[str, Any]
    transformer: str
    config: Mapping[str, Any]
    converted: Callable[[Weights], Weights]
    latent: tuple[int, ...]
    text: tuple[int, int]
    extra: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    cfg: float = 4.0

    def known(self) -> bool:
        """Whether this version of ComfyUI has the family."""
        return comfy.model_detection.model_config_from_unet_config(dict(self.unet)) is not None

    def native(self) -> comfy.model_patcher.ModelPatcher:
        """ComfyUI's own model, and nothing of ours; weights are such that no part is lost in rounding."""
        random = seeded(0)
        model = comfy.model_detection.model_config_from_unet_config(dict(self.unet)).get_model({})
        module = model.diffusion_model
        module.load_state_dict({name: _weight(name, tensor, random) for name, tensor in module.state_dict().items()})
        module.float().dtype = torch.float32
        cpu = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)

    def write(self, folder: Path, native: comfy.model_patcher.ModelPatcher) -> None:
        """Save the native model's weights as a diffusers checkpoint."""
        transformer = getattr(diffusers, self.transformer)(**self.config)
        weights = {name: tensor.clone() for name, tensor in native.model.diffusion_model.state_dict().items()}
        transformer.load_state_dict(self.converted(weights))
        transformer.save_pretrained(folder / "transformer")
        index = {"_class_name": "DiffusionPipeline", "transformer": ["diffusers", self.transformer]}
        (folder / "model_index.json").write_text(json.dumps(index))

    def conditioning(self, seed: int, shorter: int = 0) -> list[Any]:
        """One random conditioning."""
        random = seeded(seed)
        tokens, width = self.text
        return [[random(1, tokens - shorter, width), self.extra(random)]]


def seeded(seed: int) -> Random:
    """Normal numbers that are the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def by_map(weights: Weights, mapped: Mapping[str, Any], wanted: Sequence[str]) -> Weights:
    """Weights by one of ``comfy.utils``' maps from diffusers' names to native ones."""
    found = {}
    for name in wanted:
        source, *rest = [mapped[name]] if isinstance(mapped[name], str) else mapped[name]
        tensor = weights[source]
        if rest and rest[0] is not None:
            tensor = tensor.narrow(*rest[0])
        found[name] = (rest[1](tensor) if len(rest) > 1 else tensor).clone()
    return found


def _weight(name: str, like: Tensor, random: Random) -> Tensor:
    if like.ndim > 1:
        return random(*like.shape) * like[0].numel() ** -0.5
    return random(*like.shape) * 0.1 + (0.0 if name.endswith("bias") else 1.0)
