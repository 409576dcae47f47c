"""ComfyUI's deterministic samplers on given sigmas. A test compares them with ComfyUI's functions.

Each sampler is a generator: it yields a ``ModelCall``, is sent the predicted x0, and returns the final latent. All are
elementwise: each value of the latent depends only on the same value of the predictions, so a part of a latent can be
stepped separately.

The algorithms are those of k-diffusion (https://github.com/crowsonkb/k-diffusion), as in ComfyUI's
``comfy/k_diffusion/sampling.py``. Samplers that draw noise are not included, because the noise would have to be the
same as ComfyUI's.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ModelCall:
    """A request for the model's predicted x0.

    Attributes:
        x: the noised latent.
        sigma: its noise level, a 0-dim float32 tensor.
        step: index of the step that begins with this call; None for a second call within a step.
    """

    x: Tensor
    sigma: Tensor
    step: int | None = None


SamplerRun = Generator[ModelCall, Tensor, Tensor]
"""A sampler's run: yields model calls, is sent their x0, and returns the final latent."""

Sampler = Callable[[Tensor, Tensor], SamplerRun]
"""``(x, sigmas)`` to a run."""

Denoise = Callable[[Tensor, Tensor], Tensor]
"""``(x, sigma)`` to the predicted x0."""

OnStep = Callable[[int, Tensor], None]
"""Called once for each step, with its index and the predicted x0."""


def run_sampler(sampler: Sampler, denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep) -> Tensor:
    """Run a sampler from the noised latent ``x``, answering its calls with ``denoise``; return the final latent."""
    steps = sampler(x, sigmas)
    try:
        call = next(steps)
        while True:
            denoised = denoise(call.x, call.sigma)
            if call.step is not None:
                on_step(call.step, denoised)
            call = steps.send(denoised)
    except StopIteration as end:
        final: Tensor = end.value
        return final


def planned_calls(sampler: Sampler, sigmas: Tensor) -> list[ModelCall]:
    """Return the model calls that a sampler makes for these sigmas, with empty latents."""
    steps = sampler(sigmas.new_empty(0), sigmas)
    calls = [next(steps)]
    with suppress(StopIteration):
        while True:
            calls.append(steps.send(calls[-1].x))
    return calls


def euler(x: Tensor, sigmas: Tensor) -> SamplerRun:
    """Algorithm 2 of Karras et al. (https://arxiv.org/abs/2206.00364), without churn and second-order correction."""
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def heun(x: Tensor, sigmas: Tensor) -> SamplerRun:
    """Algorithm 2 of Karras et al. (https://arxiv.org/abs/2206.00364), without churn."""
    is_zero = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope, step = (x - denoised) / sigmas[i], sigmas[i + 1] - sigmas[i]
        if not is_zero[i + 1]:
            x_2 = x + slope * step
            denoised_2 = yield ModelCall(x_2, sigmas[i + 1])
            slope = (slope + (x_2 - denoised_2) / sigmas[i + 1]) / 2
        x = x + slope * step
    return x


def dpm_2(x: Tensor, sigmas: Tensor) -> SamplerRun:
    """DPM-Solver-2 (https://arxiv.org/abs/2206.00927), with the midpoint in log sigma."""
    is_zero = _zeros(sigmas)
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        slope = (x - denoised) / sigmas[i]
        if not is_zero[i + 1]:
            middle = sigmas[i].log().lerp(sigmas[i + 1].log(), 0.5).exp()
            x_2 = x + slope * (middle - sigmas[i])
            denoised_2 = yield ModelCall(x_2, middle)
            slope = (x_2 - denoised_2) / middle
        x = x + slope * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(x: Tensor, sigmas: Tensor) -> SamplerRun:
    """DPM-Solver++(2M) (https://arxiv.org/abs/2211.01095)."""
    is_zero = _zeros(sigmas)
    times = sigmas.log().neg()
    previous = None
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        h = times[i + 1] - times[i]
        target = denoised
        if previous is not None and not is_zero[i + 1]:
            r = (times[i] - times[i - 1]) / h
            target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * previous
        x = (times[i + 1].neg().exp() / times[i].neg().exp()) * x - (-h).expm1() * target
        previous = denoised
    return x


def ipndm(x: Tensor, sigmas: Tensor) -> SamplerRun:
    """The fourth-order linear multistep method of PNDM (https://arxiv.org/abs/2202.09778), constant coefficients."""
    is_zero = _zeros(sigmas)
    past: list[Tensor] = []
    for i in range(len(sigmas) - 1):
        denoised = yield ModelCall(x, sigmas[i], i)
        past = [(x - denoised) / sigmas[i], *past][: len(_ADAMS_BASHFORTH)]
        weights, divisor = _ADAMS_BASHFORTH[len(past) - 1]
        slope = sum((w * d for w, d in zip(weights[1:], past[1:], strict=True)), weights[0] * past[0]) / divisor
        x = denoised if is_zero[i + 1] else x + (sigmas[i + 1] - sigmas[i]) * slope
    return x


_ADAMS_BASHFORTH: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 1),
    ((3, -1), 2),
    ((23, -16, 5), 12),
    ((55, -59, 37, -9), 24),
)
"""Weights of the slopes, newest first, and their divisor, for each order from 1 to 4."""

SAMPLERS: dict[str, Sampler] = {
    "euler": euler, "heun": heun, "dpm_2": dpm_2, "dpmpp_2m": dpmpp_2m, "ipndm": ipndm,
}  # fmt: skip
"""Samplers by ComfyUI's names."""


def _zeros(sigmas: Tensor) -> list[bool]:
    return [value == 0 for value in sigmas.tolist()]
