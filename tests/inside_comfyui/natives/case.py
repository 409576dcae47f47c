"""A tiny model of ComfyUI's own class with random weights, and the same weights as a diffusers checkpoint."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_patcher
import torch
from any_folder_name.parallel_backend.families.modules import module_class_of
from helpers import dynamic_vram
from torch import Tensor

Weights = dict[str, Tensor]
Random = Callable[..., Tensor]
"""Returns normally distributed numbers of the shape that its arguments give."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant of a family.

    Attributes:
        unet: the ``unet_config`` that ComfyUI detects.
        transformer: diffusers' class.
        config: the config of diffusers' class.
        published: how the published model's config differs from diffusers' defaults.
        converted: maps the native weights to diffusers' names.
        latent: the latent's shape.
        text: the prompt's tokens and width.
        fixed: names in ``unet`` that detection does not find, or not from the model's size.
        latent_entries: entries of LATENT that replace or complement the zeros.
        extra: entries of CONDITIONING besides the text.
        shorter: how many tokens the negative prompt is shorter.
        cfg: the guidance scale.
        pipeline: the class in ``model_index.json``.
        near_zero: ends of the names of vectors that are near 0; the others are near 1.
        repair: corrects an error of ComfyUI's transformer that the backend does not share.
        patch: what a native node does to the MODEL before sampling.
    """

    unet: Mapping[str, Any]
    transformer: str
    config: Mapping[str, Any]
    published: Mapping[str, Any]
    converted: Callable[[Weights], Weights]
    latent: tuple[int, ...]
    text: tuple[int, int]
    fixed: frozenset[str] = frozenset()
    latent_entries: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    extra: Callable[[Random], dict[str, Any]] = field(default=lambda random: {})
    shorter: int = 3
    cfg: float = 4.0
    pipeline: str = "DiffusionPipeline"
    near_zero: tuple[str, ...] = ("bias",)
    repair: Callable[[Any], None] = field(default=lambda module: None)
    patch: Callable[[Any], Any] = field(default=lambda model: model)

    @dynamic_vram.off()
    def native(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> comfy.model_patcher.ModelPatcher:
        """Return ComfyUI's own model, without any code of ours. The weights keep every part above rounding errors."""
        random = seeded(seed)
        core_config = comfy.model_detection.model_config_from_unet_config(dict(self.unet))
        core_config.set_inference_dtype(dtype, None)
        model = core_config.get_model({})
        module = model.diffusion_model
        weights = {
            name: random_weight(name, tensor, random, self.near_zero) for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(weights)
        self.repair(module)
        cpu = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)

    def write(self, folder: Path, native: comfy.model_patcher.ModelPatcher) -> None:
        """Save the native model's weights as a diffusers checkpoint."""
        transformer = module_class_of(self.transformer)(**self.config)
        weights = {name: tensor.clone() for name, tensor in native.model.diffusion_model.state_dict().items()}
        transformer.load_state_dict(self.converted(weights))
        self.describe(folder, self.config)
        transformer.save_pretrained(folder / "transformer")

    def describe(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write the JSON files of a checkpoint without weights. diffusers' defaults complete ``config``."""
        parameters = inspect.signature(module_class_of(self.transformer)).parameters
        full_config = {name: parameter.default for name, parameter in parameters.items()} | dict(config)
        index = {"_class_name": self.pipeline, "transformer": ["diffusers", self.transformer]}
        (folder / "transformer").mkdir(parents=True)
        (folder / "transformer" / "config.json").write_text(json.dumps(full_config))
        (folder / "model_index.json").write_text(json.dumps(index))

    def samples(self) -> dict[str, Any]:
        """Return LATENT."""
        return {"samples": torch.zeros(self.latent), **self.latent_entries(seeded(3))}

    def conditioning(self, seed: int, shorter: int = 0) -> list[Any]:
        """Return one random conditioning whose text is ``shorter`` tokens shorter."""
        random = seeded(seed)
        tokens, width = self.text
        text, extra = random(1, tokens - shorter, width), self.extra(random)
        for name in {"attention_mask", "minimax_token_tags"} & extra.keys():
            extra[name] = extra[name][..., : text.shape[1]]
        return [[text, extra]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The ModelSampling node of a family.

    Attributes:
        node: its class.
        inputs: its inputs besides the MODEL.
        needed: whether ComfyUI's samplers need it, so that it also stands behind a loader.
        module: the module of ``comfy_extras`` that has it; empty if ``nodes_model_advanced`` does.
    """

    node: str
    inputs: dict[str, Any]
    needed: bool = False
    module: str = ""


def seeded(seed: int) -> Random:
    """Return a source of normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def by_map(weights: Weights, mapped: Mapping[str, Any], wanted: Sequence[str]) -> Weights:
    """Map native weights to diffusers' names ``wanted`` with one of ``comfy.utils``' maps."""
    converted = {}
    for name in wanted:
        source, *rest = [mapped[name]] if isinstance(mapped[name], str) else mapped[name]
        tensor = weights[source]
        if rest and rest[0] is not None:
            tensor = tensor.narrow(*rest[0])
        converted[name] = (rest[1](tensor) if len(rest) > 1 else tensor).clone()
    return converted


def random_weight(name: str, like: Tensor, random: Random, near_zero: tuple[str, ...] = ("bias",)) -> Tensor:
    """Return a weight of the shape of ``like`` that keeps the magnitude of activations.

    ``near_zero`` are ends of the names of vectors that are near 0. The others are near 1.
    """
    if like.ndim > 1:
        return random(*like.shape) * like[0].numel() ** -0.5
    return random(*like.shape) * 0.1 + (0.0 if name.endswith(near_zero) else 1.0)
