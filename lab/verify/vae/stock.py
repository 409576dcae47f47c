"""Decoding and encoding by diffusers' own modules and pipelines, untiled, in one process."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.engine.unclamped import Unclamped
from parallel_backend.vaes import VAE, TiledVAE
from parallel_backend.vaes.ltx import NOISE, TIMESTEP

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of pixels in 0..1 by colour."""

COMFYUI = ("AutoencoderKLLTXVideo", "AutoencoderKLMochi")
"""Classes that ``VAE.prepare`` makes decode as in ComfyUI; all other classes are unchanged."""


def stock(module: Any, vae: VAE) -> Any:
    """Prepare a module for the comparison: as in ComfyUI if listed in ``COMFYUI``, and without tiling.

    The tiles of a VAE that works in its own stay.
    """
    if type(module).__name__ in COMFYUI:
        vae.prepare(module)
    if isinstance(vae, TiledVAE):
        module.enable_tiling(*[vae.own_tile] * 2, *[vae.own_overlap] * 2)
        return module
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
    if name == "AutoencoderKLMiniMaxH3":
        mean, std = (_by_channel(values, latent) for values in (module.latent_mean, module.latent_std))
        return _from_imagenet(_decode_clips(module, latent * std + mean))
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
    if name == "AutoencoderKLMiniMaxH3":
        mean, std = (_by_channel(values, pixels) for values in IMAGENET)
        raw = module.encode(((pixels + 1) / 2 - mean) / std).latent_dist.mode().float()
        scaled: Tensor = (raw - _by_channel(module.latent_mean, raw)) / _by_channel(module.latent_std, raw)
        return scaled
    latent: Tensor = module.encode(pixels).latent_dist.mode()
    if name == "AutoencoderKLFlux2":
        mean, std = _flux2_statistics(module)
        packed: Tensor = Flux2Pipeline._patchify_latents(latent)
        return (packed - mean) / std
    if name == "AutoencoderKLLTXVideo":
        normalised: Tensor = LTXPipeline._normalize_latents(latent, module.latents_mean, module.latents_std)
        return normalised
    return latent


def _by_channel(values: Any, like: Tensor) -> Tensor:
    """Return one value per channel, for videos."""
    return torch.as_tensor(values).to(like).view(1, -1, 1, 1, 1)


def _from_imagenet(normalised: Tensor) -> Tensor:
    """Return pixels around -1..1 of pixels that are normalised by ImageNet's statistics."""
    pixels = normalised.float()
    mean, std = (_by_channel(values, pixels) for values in IMAGENET)
    return (pixels * std + mean) * 2 - 1


def _decode_clips(module: Any, raw: Tensor) -> Tensor:
    """Decode MiniMax-H3's latent; as in ComfyUI also one of one or two frames, which fill no clip of diffusers'."""
    if raw.shape[2] == 1:
        image: Tensor = module._decode_clip(raw)
        return image[:, :, -1:]
    if raw.shape[2] == 2:
        start: Tensor = module.decode(torch.cat([raw, *[raw[:, :, -1:]] * module.tokens_chunk_size], dim=2)).sample
        return start[:, :, : module.frame_overlap]
    video: Tensor = module.decode(raw).sample
    return video


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
