"""What a sampler is to the step loops: a generator that asks for model calls.

A sampler yields a ``ModelCall``, is sent the predicted x0, and returns the final latent. All samplers are elementwise:
each value of the latent depends only on the same value of the predictions and of the noise, so a part of a latent can
be stepped separately.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins.

    Attributes:
        step: index of its first step.
        history: the ``ModelCall.history`` of another run at that step. Without it, multistep samplers begin that step
            as they do the first one.
    """

    step: int = 0
    history: tuple[Tensor, ...] = ()


BEGINNING = Start()


@dataclass(frozen=True)
class ModelCall:
    """A request for the model's predicted x0.

    Attributes:
        x: the noised latent.
        sigma: its noise level, a 0-dim float32 tensor.
        step: index of the step that begins with this call; None for a second call within a step.
        history: what another run needs, beside ``x``, to go on from a call that begins a step.
    """

    x: Tensor
    sigma: Tensor
    step: int | None = None
    history: tuple[Tensor, ...] = ()


SamplerRun = Generator[ModelCall, Tensor, Tensor]
"""A sampler's run: yields model calls, is sent their x0, and returns the final latent."""


class Sampler(Protocol):
    """``(x, sigmas, start)`` to a run. ``x`` is the first call's."""

    def __call__(self, x: Tensor, sigmas: Tensor, start: Start = ..., /) -> SamplerRun:
        """Return a run."""


Denoise = Callable[[Tensor, Tensor], Tensor]
"""``(x, sigma)`` to the predicted x0."""

OnStep = Callable[[int, Tensor, ModelCall | None], None]
"""Called after each step, with its index, its first predicted x0 and the call that begins the next step."""


def run_sampler(
    sampler: Sampler, denoise: Denoise, x: Tensor, sigmas: Tensor, on_step: OnStep, start: Start = BEGINNING
) -> Tensor:
    """Run a sampler from the noised latent ``x``, answering its calls with ``denoise``; return the final latent."""
    steps = sampler(x, sigmas, start)
    call, step, first = next(steps), start.step, x
    try:
        while True:
            denoised = denoise(call.x, call.sigma)
            if call.step is not None:
                step, first = call.step, denoised
            call = steps.send(denoised)
            if call.step is not None:
                on_step(step, first, call)
    except StopIteration as end:
        on_step(step, first, None)
        final: Tensor = end.value
        return final


def planned_calls(sampler: Sampler, sigmas: Tensor, start: Start = BEGINNING) -> Iterator[ModelCall]:
    """Yield the model calls that a sampler makes for these sigmas, with empty latents."""
    steps = sampler(sigmas.new_empty(0), sigmas, start)
    call = next(steps)
    with suppress(StopIteration):
        while True:
            yield call
            call = steps.send(call.x)


def zeros(sigmas: Tensor) -> list[bool]:
    """Return which sigmas are zero."""
    return [value == 0 for value in sigmas.tolist()]
