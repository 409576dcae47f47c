"""Decoding and encoding by diffusers' own modules and pipelines, untiled, in one process."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.engine.unclamped import Unclamped
from parallel_backend.vaes import VAE
from parallel_backend.vaes.ltx import NOISE, TIMESTEP

COMFYUI = ("AutoencoderKLLTXVideo", "AutoencoderKLMochi")
"""Classes that ``VAE.prepare`` makes decode as in ComfyUI; all other classes are unchanged."""


def stock(module: Any, vae: VAE) -> Any:
    """Prepare a module for the comparison: as in ComfyUI if listed in ``COMFYUI``, and without tiling."""
    if type(module).__name__ in COMFYUI:
        vae.prepare(module)
    module.use_tiling = module.use_framewise_encoding = module.use_framewise_decoding = False
    return module


def decode(module: Any, latent: Tensor) -> Tensor:
    """Decode a latent from the denoiser as the family's pipeline does, to pixels ``[B, 3, ...]`` around -1..1."""
    from diffusers import Flux2Pipeline, LattePipeline, LTXPipeline

    name = type(module).__name__
    if name == "AutoencoderKLFlux2":
        mean, std = _flux2_statistics(module)
        latent = Flux2Pipeline._unpatchify_latents(latent * std + mean)
    if name == "AutoencoderKLLTXVideo":
        if module.config.timestep_conditioning:
            return torch.cat([_decode_noisy(module, sample[None]) for sample in latent])
        latent = LTXPipeline._denormalize_latents(latent, module.latents_mean, module.latents_std)
    if name == "AutoencoderKLTemporalDecoder":
        scaled, frames = latent * module.config.scaling_factor, latent.shape[2]
        pipeline: Any = SimpleNamespace(vae=module)
        video: Tensor = LattePipeline.decode_latents(pipeline, scaled, frames, decode_chunk_size=frames)
        return video
    if name == "VideoAutoencoderPipeline":
        chunks, rest = divmod(latent.shape[2], module.chunk)
        frames = chunks * module.config.micro_frame_size + (4 * rest - 3 if rest else 0)
        whole: Tensor = module.decode(latent, frames)
        return whole
    with Unclamped():
        pixels: Tensor = module.decode(latent).sample
    return pixels


def encode(module: Any, pixels: Tensor) -> Tensor:
    """Encode pixels ``[B, 3, ...]`` in -1..1 to a latent in ComfyUI's convention."""
    from diffusers import Flux2Pipeline, LTXPipeline

    name = type(module).__name__
    if name == "AutoencoderKLTemporalDecoder":
        frames = module.encode(pixels.movedim(2, 1).flatten(0, 1)).latent_dist.mode()
        latents: Tensor = frames.unflatten(0, (len(pixels), -1)).movedim(1, 2)
        return latents
    if name == "VideoAutoencoderPipeline":
        joined: Tensor = module.encode(pixels)
        return joined
    latent: Tensor = module.encode(pixels).latent_dist.mode()
    if name == "AutoencoderKLFlux2":
        mean, std = _flux2_statistics(module)
        packed: Tensor = Flux2Pipeline._patchify_latents(latent)
        return (packed - mean) / std
    if name == "AutoencoderKLLTXVideo":
        normalised: Tensor = LTXPipeline._normalize_latents(latent, module.latents_mean, module.latents_std)
        return normalised
    return latent


def _flux2_statistics(module: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation as ``Flux2Pipeline`` computes them."""
    mean = module.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(module.bn.running_var.view(1, -1, 1, 1) + module.config.batch_norm_eps)


def _decode_noisy(module: Any, latent: Tensor) -> Tensor:
    """Decode a latent with noise and a timestep, for decoders that denoise."""
    from diffusers import LTXPipeline

    torch.manual_seed(0)
    noisy = NOISE * torch.randn_like(latent) + (1 - NOISE) * latent
    noisy = LTXPipeline._denormalize_latents(noisy, module.latents_mean, module.latents_std)
    pixels: Tensor = module.decode(noisy, torch.tensor([TIMESTEP], dtype=latent.dtype, device=latent.device)).sample
    return pixels
