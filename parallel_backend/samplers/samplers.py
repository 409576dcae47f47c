"""Step loops on given sigmas: ComfyUI's deterministic samplers, held to its functions by a test.

Each is a generator: it asks for the predicted x0 of a latent at a sigma, is sent it, and returns the last latent.
All are elementwise: a value of the latent depends on the same value of what is predicted alone, so that a part of a
latent can be stepped by itself. Algorithms: k-diffusion (https://github.com/crowsonkb/k-diffusion) as ComfyUI has it
in ``comfy/k_diffusion/sampling.py``. Samplers that draw noise are left out, since the noise would have to be
ComfyUI's own.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ModelCall:
    """For the predicted x0 of ``x`` at ``sigma``, a 0-dim float32 tensor.

    ``step`` is the index of the step that begins with it; None for a second look within one.
    """

    x: Tensor
    sigma: Tensor
    step: int | None = None


Steps = Generator[ModelCall, Tensor, Tensor]

Sampler = Callable[[Tensor, Tensor], Steps]
"""``(x, sigmas)`` to the steps."""

Denoise = Callable[[Tensor, Tensor], Tensor]
"""``(x, sigma)`` to the predicted x0."""

OnStep = Callable[[int, Tensor], None]
"""Called once a step with its index and the predicted x0."""


def drive(sampler: Sampler, denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """Answer all that a sampler asks for; the latent that it returns."""
    steps = sampler(x, sigmas)
    try:
        ask = next(steps)
        while True:
            denoised = denoise(ask.x, ask.sigma)
            if ask.step is not None:
                on_step(ask.step, denoised)
            ask = steps.send(denoised)
    except StopIteration as end:
        last: Tensor = end.value
        return last


def dry(sampler: Sampler, sigmas: Tensor) -> list[ModelCall]:
    """All that a sampler asks for, of a latent without values."""
    steps = sampler(sigmas.new_empty(0), sigmas)
    asks = [next(steps)]
    with suppress(StopIteration):
        while True:
            asks.append(steps.send(asks[-1].x))
    return asks


def euler(x: Tensor, sigmas: Tensor) -> Steps:
    """Algorithm 2 without churn and correction of Karras et al. (https://arxiv.org/abs/2206.00364)."""
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def heun(x: Tensor, sigmas: Tensor) -> Steps:
    """Algorithm 2 without churn of Karras et al. (https://arxiv.org/abs/2206.00364)."""
    ends_clean = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope, step = (x - denoised) / sigmas[i], sigmas[i + 1] - sigmas[i]
        if not ends_clean[i + 1]:
            x_2 = x + slope * step
            denoised_2 = yield ModelCall(x_2, sigmas[i + 1])
            slope = (slope + (x_2 - denoised_2) / sigmas[i + 1]) / 2
        x = x + slope * step
    return x


def dpm_2(x: Tensor, sigmas: Tensor) -> Steps:
    """DPM-Solver-2 (https://arxiv.org/abs/2206.00927) with the midpoint in log sigma."""
    ends_clean = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope = (x - denoised) / sigmas[i]
        if not ends_clean[i + 1]:
            middle = sigmas[i].log().lerp(sigmas[i + 1].log(), 0.5).exp()
            x_2 = x + slope * (middle - sigmas[i])
            denoised_2 = yield ModelCall(x_2, middle)
            slope = (x_2 - denoised_2) / middle
        x = x + slope * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(x: Tensor, sigmas: Tensor) -> Steps:
    """DPM-Solver++(2M) (https://arxiv.org/abs/2211.01095)."""
    ends_clean = _zeros(sigmas)
    times = sigmas.log().neg()
    previous = None
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        h = times[i + 1] - times[i]
        target = denoised
        if previous is not None and not ends_clean[i + 1]:
            r = (times[i] - times[i - 1]) / h
            target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * previous
        x = (times[i + 1].neg().exp() / times[i].neg().exp()) * x - (-h).expm1() * target
        previous = denoised
    return x


def ipndm(x: Tensor, sigmas: Tensor) -> Steps:
    """Fourth-order linear multistep with constant coefficients, of PNDM (https://arxiv.org/abs/2202.09778)."""
    ends_clean = _zeros(sigmas)
    past: list[Tensor] = []
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
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
