"""Samplers that draw noise. A test compares them with ComfyUI's functions.

The algorithms come from ``comfy/k_diffusion/sampling.py`` in ComfyUI. Flow models, whose noised latent is
``(1 - sigma) * x0 + sigma * noise``, have formulas of their own there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import ModelCall, SamplerRun, Start, zeros
from .noise import Draw, no_noise
from .prediction_types import PREDICTIONS, Prediction


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a sampler that draws noise knows of a request, beside latent and sigmas.

    Attributes:
        prediction: what the model predicts.
        first_sigma: what replaces a first sigma of 1 of a flow model where its signal-to-noise ratio is needed.
        noise: draws the noise of a step.
    """

    prediction: Prediction = PREDICTIONS["flow"]
    first_sigma: float = 1.0
    noise: Draw = no_noise


def euler_ancestral(x: Tensor, sigmas: Tensor, start: Start, sampling: Sampling) -> SamplerRun:
    """Euler steps below the next sigma, and noise up to it (Song et al., https://arxiv.org/abs/2011.13456)."""
    down, keep, add = (_flow_step if sampling.prediction.flow else _step)(sigmas[:-1], sigmas[1:])
    is_zero = zeros(down)
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        if is_zero[i]:
            x = denoised
            continue
        x = x + (x - denoised) / sigmas[i] * (down[i] - sigmas[i])
        x = keep[i] * x + sampling.noise(sigmas[i], sigmas[i + 1]) * add[i]
    return x


def lcm(x: Tensor, sigmas: Tensor, start: Start, sampling: Sampling) -> SamplerRun:
    """Multistep consistency sampling (https://arxiv.org/abs/2310.04378): noise is added to each predicted x0."""
    is_zero = zeros(sigmas)
    for i in range(start.step, len(sigmas) - 1):
        x = yield ModelCall(x, sigmas[i], i)
        if not is_zero[i + 1]:
            x = sampling.prediction.add_noise(sigmas[i + 1], sampling.noise(sigmas[i], sigmas[i + 1]), x)
    return x


def dpmpp_2m_sde(x: Tensor, sigmas: Tensor, start: Start, sampling: Sampling) -> SamplerRun:
    """SDE-DPM-Solver++(2M) (https://arxiv.org/abs/2211.01095), with the midpoint method."""
    is_zero = zeros(sigmas)
    if sampling.prediction.flow and float(sigmas[0]) >= 1.0:
        sigmas = torch.cat([sigmas.new_tensor([sampling.first_sigma]), sigmas[1:]])
    half_log_snr = -(sigmas.logit() if sampling.prediction.flow else sigmas.log())
    past = start.history
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i, past)
        if is_zero[i + 1]:
            x = denoised
            continue
        h = half_log_snr[i + 1] - half_log_snr[i]
        weight = sigmas[i + 1] * half_log_snr[i + 1].exp() * -(-2 * h).expm1()
        x = sigmas[i + 1] / sigmas[i] * (-h).exp() * x + weight * denoised
        if past:
            ratio = (half_log_snr[i] - half_log_snr[i - 1]) / h
            x = x + 0.5 * weight / ratio * (denoised - past[0])
        x = x + sampling.noise(sigmas[i], sigmas[i + 1]) * sigmas[i + 1] * (-(-2 * h).expm1()).sqrt()
        past = (denoised,)
    return x


def _step(sigma: Tensor, next_sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sigmas to step down to, and the weights of the latent there and of the noise."""
    up = torch.minimum((next_sigma**2 * (sigma**2 - next_sigma**2) / sigma**2).sqrt(), next_sigma)
    return (next_sigma**2 - up**2).sqrt(), torch.ones_like(up), up


def _flow_step(sigma: Tensor, next_sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``_step`` for flow models."""
    down = next_sigma * (1 + (next_sigma / sigma - 1))
    keep = (1 - next_sigma) / (1 - down)
    return down, keep, (next_sigma**2 - down**2 * keep**2).sqrt()
