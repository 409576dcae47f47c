"""What ComfyUI's own nodes make for LTX-2, with encoders that return random latents in place of its VAEs."""

from types import SimpleNamespace
from typing import Any

import comfy.samplers
import torch
from comfy_extras import nodes_lt
from comfy_extras.nodes_custom_sampler import SamplerCustomAdvanced
from helpers.inside_fixtures import native_case
from natives import CASES
from natives.case import Random, seeded

Latent = dict[str, Any]
SIZE = (4, 4, 6)
"""Of the picture's latent: 25 frames of 192 x 128, which a guide of half the size fits."""
RATE = 25.0


class Encoder:
    """Stands for the VAE of pictures: random latents of the right size."""

    downscale_index_formula = (8, 32, 32)

    def __init__(self, random: Random) -> None:
        self.random = random

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        frames, height, width, _ = pixels.shape
        return self.random(1, 128, (frames - 1) // 8 + 1, height // 32, width // 32)


def sound_encoder(random: Random, frames: int) -> Any:
    """Return what stands for the VAE of sounds."""
    return SimpleNamespace(audio_sample_rate=16000, encode=lambda wave: random(1, 8, frames, 16))


def prompts(name: str, length: int = 11) -> tuple[list[Any], list[Any]]:
    """Return a positive and a negative prompt."""
    width = CASES[name].text[1]
    texts = [seeded(seed)(1, length, width) for seed in (1, 2)]
    positive, negative = ([[text, {}]] for text in texts)
    made: tuple[list[Any], list[Any]] = nodes_lt.LTXVConditioning.execute(positive, negative, RATE).args
    return made


def empty(size: tuple[int, ...] = SIZE) -> Latent:
    """Return an empty latent of a picture."""
    return {"samples": torch.zeros(1, 128, *size)}


def with_sound(picture: Latent, tokens: int = 26, mask: torch.Tensor | None = None) -> Latent:
    """Return a latent of picture and sound."""
    sound: Latent = {"samples": torch.zeros(1, 8, tokens, 16)}
    if mask is not None:
        sound |= {"samples": seeded(9)(1, 8, tokens, 16), "noise_mask": mask}
    made: Latent = nodes_lt.LTXVConcatAVLatent.execute(picture, sound).args[0]
    return made


def guided(guides: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return prompts and a latent with guides, each from the inputs of an *LTXVAddGuide*."""
    (positive, negative), latent = prompts(name), empty()
    for seed, guide in enumerate(guides):
        given = {"frame_idx": 0, "image": torch.rand(1, 128, 192, 3), **guide}
        positive, negative, latent = nodes_lt.LTXVAddGuide.execute(
            positive, negative, Encoder(seeded(20 + seed)), latent, **given
        ).args
    return {"positive": positive, "negative": negative, "latent": with_sound(latent)}


def custom(model: Any, guider: Any, latent: Latent, sigmas: torch.Tensor | None = None, seed: int = 5) -> Any:
    """Run *SamplerCustomAdvanced* with Euler and return its latent."""
    if sigmas is None:
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)

    def noise(latent: Latent) -> Any:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(part.shape, generator=generator) for part in latent["samples"].unbind()]
        return type(latent["samples"])(parts)

    source = SimpleNamespace(seed=seed, generate_noise=noise)
    sampler = comfy.samplers.sampler_object("euler")
    return SamplerCustomAdvanced.execute(source, guider, sampler, sigmas, latent).args[0]


def native(name: str) -> Any:
    """Return ComfyUI's own model of a case."""
    return native_case(name)
