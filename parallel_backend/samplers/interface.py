"""What a sampler is to the step loops: a generator that asks for model calls.

A sampler yields a ``ModelCall``, is sent the predicted x0, and returns the final latent. All samplers are elementwise:
each value of the latent depends only on the same value of the predictions and of the noise, so a part of a latent can
be stepped separately.
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


def zeros(sigmas: Tensor) -> list[bool]:
    """Return which sigmas are zero."""
    return [value == 0 for value in sigmas.tolist()]
