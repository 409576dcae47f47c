"""Step loops on given sigmas: ComfyUI's deterministic samplers, held to its functions by a test.

Each is ``(denoise, x, sigmas, on_step) -> x`` with ``denoise(x, sigma)`` the predicted x0. Algorithms:
k-diffusion (https://github.com/crowsonkb/k-diffusion) as ComfyUI has it in ``comfy/k_diffusion/sampling.py``.
Samplers that draw noise are left out, since the noise would have to be ComfyUI's own.
"""

from collections.abc import Callable

from torch import Tensor

Denoise = Callable[[Tensor, Tensor], Tensor]
"""``(x, sigma)`` to the predicted x0; ``sigma`` is a 0-dim float32 tensor."""

OnStep = Callable[[int, Tensor], None]
"""Called once a step with its index and the predicted x0."""

Sampler = Callable[[Denoise, Tensor, Tensor, OnStep], Tensor]


def euler(denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """Algorithm 2 without churn and correction of Karras et al. (https://arxiv.org/abs/2206.00364)."""
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        on_step(i, denoised)
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def heun(denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """Algorithm 2 without churn of Karras et al. (https://arxiv.org/abs/2206.00364)."""
    ends_clean = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        on_step(i, denoised)
        slope, step = (x - denoised) / sigmas[i], sigmas[i + 1] - sigmas[i]
        if not ends_clean[i + 1]:
            x_2 = x + slope * step
            slope_2 = (x_2 - denoise(x_2, sigmas[i + 1])) / sigmas[i + 1]
            slope = (slope + slope_2) / 2
        x = x + slope * step
    return x


def dpm_2(denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """DPM-Solver-2 (https://arxiv.org/abs/2206.00927) with the midpoint in log sigma."""
    ends_clean = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        on_step(i, denoised)
        slope = (x - denoised) / sigmas[i]
        if not ends_clean[i + 1]:
            middle = sigmas[i].log().lerp(sigmas[i + 1].log(), 0.5).exp()
            x_2 = x + slope * (middle - sigmas[i])
            slope = (x_2 - denoise(x_2, middle)) / middle
        x = x + slope * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """DPM-Solver++(2M) (https://arxiv.org/abs/2211.01095)."""
    ends_clean = _zeros(sigmas)
    times = sigmas.log().neg()
    previous = None
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        on_step(i, denoised)
        h = times[i + 1] - times[i]
        target = denoised
        if previous is not None and not ends_clean[i + 1]:
            r = (times[i] - times[i - 1]) / h
            target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * previous
        x = (times[i + 1].neg().exp() / times[i].neg().exp()) * x - (-h).expm1() * target
        previous = denoised
    return x


def ipndm(denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """Fourth-order linear multistep with constant coefficients, of PNDM (https://arxiv.org/abs/2202.09778)."""
    ends_clean = _zeros(sigmas)
    past: list[Tensor] = []
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        on_step(i, denoised)
        past = [(x - denoised) / sigmas[i], *past][: len(_ADAMS_BASHFORTH)]
        weights, divisor = _ADAMS_BASHFORTH[len(past) - 1]
        slope = sum((w * d for w, d in zip(weights[1:], past[1:], strict=True)), weights[0] * past[0]) / divisor
        x = denoised if ends_clean[i + 1] else x + (sigmas[i + 1] - sigmas[i]) * slope
    return x


_ADAMS_BASHFORTH: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 1),
    ((3, -1), 2),
    ((23, -16, 5), 12),
    ((55, -59, 37, -9), 24),
)

SAMPLERS: dict[str, Sampler] = {
    "euler": euler, "heun": heun, "dpm_2": dpm_2, "dpmpp_2m": dpmpp_2m, "ipndm": ipndm,
}  # fmt: skip
"""Sampler by ComfyUI's name for it."""


def _zeros(sigmas: Tensor) -> list[bool]:
    return [value == 0 for value in sigmas.tolist()]
