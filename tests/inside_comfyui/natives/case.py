"""A tiny model of ComfyUI's own class with random weights, and the same weights as a diffusers checkpoint."""

import inspect
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
        fixed: names in ``unet`` that detection has one value for, or none, whatever the size of the model.
        published: what the config of the published model says beside diffusers' defaults.
        converted: the native weights under diffusers' names.
        latent: its shape; given: what LATENT holds beside zeros of it, or in their place.
        text: tokens and width; shorter: by how many tokens the negative prompt's is.
        extra: what CONDITIONING holds beside the text.
        cfg: guidance; pipeline: the class in ``model_index.json``.
    """

    unet: Mapping[str, Any]
    transformer: str
    config: Mapping[str, Any]
    published: Mapping[str, Any]
    converted: Callable[[Weights], Weights]
    latent: tuple[int, ...]
    text: tuple[int, int]
    fixed: frozenset[str] = frozenset()
    given: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    extra: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    shorter: int = 3
    cfg: float = 4.0
    pipeline: str = "DiffusionPipeline"

    def native(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> comfy.model_patcher.ModelPatcher:
        """ComfyUI's own model, and nothing of ours; weights are such that no part is lost in rounding."""
        random = seeded(seed)
        core = comfy.model_detection.model_config_from_unet_config(dict(self.unet))
        core.set_inference_dtype(dtype, None)
        model = core.get_model({})
        module = model.diffusion_model
        module.load_state_dict({name: _weight(name, tensor, random) for name, tensor in module.state_dict().items()})
        cpu = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)

    def write(self, folder: Path, native: comfy.model_patcher.ModelPatcher) -> None:
        """Save the native model's weights as a diffusers checkpoint."""
        transformer = getattr(diffusers, self.transformer)(**self.config)
        weights = {name: tensor.clone() for name, tensor in native.model.diffusion_model.state_dict().items()}
        transformer.load_state_dict(self.converted(weights))
        self.describe(folder, self.config)
        transformer.save_pretrained(folder / "transformer")

    def describe(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write the JSON files of a checkpoint without weights; what ``config`` leaves out is diffusers' default."""
        parameters = inspect.signature(getattr(diffusers, self.transformer)).parameters
        whole = {name: parameter.default for name, parameter in parameters.items()} | dict(config)
        index = {"_class_name": self.pipeline, "transformer": ["diffusers", self.transformer]}
        (folder / "transformer").mkdir(parents=True)
        (folder / "transformer" / "config.json").write_text(json.dumps(whole))
        (folder / "model_index.json").write_text(json.dumps(index))

    def samples(self) -> dict[str, Any]:
        """LATENT."""
        return {"samples": torch.zeros(self.latent), **self.given(seeded(3))}

    def conditioning(self, seed: int, shorter: int = 0) -> list[Any]:
        """One random conditioning."""
        random = seeded(seed)
        tokens, width = self.text
        text, extra = random(1, tokens - shorter, width), self.extra(random)
        if "attention_mask" in extra:
            extra["attention_mask"] = extra["attention_mask"][:, : text.shape[1]]
        return [[text, extra]]


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
