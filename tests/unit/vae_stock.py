"""What diffusers' own modules and pipelines make of latents and pixels."""

from types import SimpleNamespace

import torch
from diffusers import Flux2Pipeline, LattePipeline, LTXPipeline

from parallel_backend.vaes.ltx import NOISE, TIMESTEP


def flux2_statistics(module):
    """As Flux2Pipeline has them."""
    mean = module.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(module.bn.running_var.view(1, -1, 1, 1) + module.config.batch_norm_eps)


def stock_decode(name, module, latent):
    """Pixels in -1..1 as the family's pipeline makes them from what its denoiser gives."""
    if name == "flux2":
        mean, std = flux2_statistics(module)
        latent = Flux2Pipeline._unpatchify_latents(latent * std + mean)
    if name == "ltx_noisy":
        return torch.cat([_stock_noisy(module, sample[None]) for sample in latent])
    if name == "ltx":
        latent = LTXPipeline._denormalize_latents(latent, module.latents_mean, module.latents_std)
    if name == "temporal":
        pipeline = SimpleNamespace(vae=module)
        scaled, frames = latent * module.config.scaling_factor, latent.shape[2]
        return LattePipeline.decode_latents(pipeline, scaled, frames, decode_chunk_size=frames)
    return module.decode(latent).sample


def _stock_noisy(module, latent):
    torch.manual_seed(0)
    noisy = NOISE * torch.randn_like(latent) + (1 - NOISE) * latent
    noisy = LTXPipeline._denormalize_latents(noisy, module.latents_mean, module.latents_std)
    return module.decode(noisy, torch.tensor([TIMESTEP]).double()).sample


def stock_encode(name, module, pixels):
    """The latent as ComfyUI has it, of pixels in -1..1 and channels first."""
    if name == "temporal":
        frames = module.encode(pixels.movedim(2, 1).flatten(0, 1)).latent_dist.mode()
        return frames.unflatten(0, (len(pixels), -1)).movedim(1, 2)
    latent = module.encode(pixels).latent_dist.mode()
    if name == "flux2":
        mean, std = flux2_statistics(module)
        return (Flux2Pipeline._patchify_latents(latent) - mean) / std
    if name.startswith("ltx"):
        return LTXPipeline._normalize_latents(latent, module.latents_mean, module.latents_std)
    return latent
