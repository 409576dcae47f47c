"""Samplers that draw no noise. A test compares them with ComfyUI's functions.

The algorithms come from k-diffusion (https://github.com/crowsonkb/k-diffusion), as in ComfyUI's
``comfy/k_diffusion/sampling.py``.
"""

from torch import Tensor

from .interface import BEGINNING, ModelCall, SamplerRun, Start, zeros


def euler(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """Algorithm 2 of Karras et al. (https://arxiv.org/abs/2206.00364), without churn and second-order correction."""
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def heun(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """Algorithm 2 of Karras et al. (https://arxiv.org/abs/2206.00364), without churn."""
    is_zero = zeros(sigmas)
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope, step = (x - denoised) / sigmas[i], sigmas[i + 1] - sigmas[i]
        if not is_zero[i + 1]:
            x_2 = x + slope * step
            denoised_2 = yield ModelCall(x_2, sigmas[i + 1])
            slope = (slope + (x_2 - denoised_2) / sigmas[i + 1]) / 2
        x = x + slope * step
    return x


def dpm_2(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """DPM-Solver-2 (https://arxiv.org/abs/2206.00927), with the midpoint in log sigma."""
    is_zero = zeros(sigmas)
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope = (x - denoised) / sigmas[i]
        if not is_zero[i + 1]:
            middle = sigmas[i].log().lerp(sigmas[i + 1].log(), 0.5).exp()
            x_2 = x + slope * (middle - sigmas[i])
            denoised_2 = yield ModelCall(x_2, middle)
            slope = (x_2 - denoised_2) / middle
        x = x + slope * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """DPM-Solver++(2M) (https://arxiv.org/abs/2211.01095)."""
    is_zero = zeros(sigmas)
    times = sigmas.log().neg()
    past = start.history
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i, past)
        h = times[i + 1] - times[i]
        target = denoised
        if past and not is_zero[i + 1]:
            r = (times[i] - times[i - 1]) / h
            target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * past[0]
        x = (times[i + 1].neg().exp() / times[i].neg().exp()) * x - (-h).expm1() * target
        past = (denoised,)
    return x


def ipndm(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """The fourth-order linear multistep method of PNDM (https://arxiv.org/abs/2202.09778), constant coefficients."""
    is_zero = zeros(sigmas)
    past = start.history
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i, past)
        newest = (x - denoised) / sigmas[i]
        weights, divisor = _ADAMS_BASHFORTH[len(past)]
        slope = sum((w * d for w, d in zip(weights[1:], past, strict=True)), weights[0] * newest) / divisor
        past = (newest, *past)[: len(_ADAMS_BASHFORTH) - 1]
        x = denoised if is_zero[i + 1] else x + (sigmas[i + 1] - sigmas[i]) * slope
    return x


def res_multistep(x: Tensor, sigmas: Tensor, start: Start = BEGINNING) -> SamplerRun:
    """The second-order multistep method of RES (https://arxiv.org/abs/2308.02157)."""
    is_zero = zeros(sigmas)
    times = sigmas.log().neg()
    past = start.history
    for i in range(start.step, len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i, past)
        if not past or is_zero[i + 1]:
            x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        else:
            h = times[i + 1] - times[i]
            c_2 = (times[i - 1] - times[i]) / h
            phi_1 = (-h).expm1() / -h
            phi_2 = (phi_1 - 1.0) / -h
            b_1, b_2 = (phi_1 - phi_2 / c_2).nan_to_num(0.0), (phi_2 / c_2).nan_to_num(0.0)  # NaN: two equal sigmas
            x = (-h).exp() * x + h * (b_1 * denoised + b_2 * past[0])
        past = (denoised,)
    return x


_ADAMS_BASHFORTH: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 1),
    ((3, -1), 2),
    ((23, -16, 5), 12),
    ((55, -59, 37, -9), 24),
)
"""Weights of the slopes, newest first, and their divisor, for each order from 1 to 4."""
