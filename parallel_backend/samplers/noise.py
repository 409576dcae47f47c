"""The noise of a sampler's steps, in the numbers that ComfyUI draws.

ComfyUI draws the whole latent's noise at once, so every rank does, too, and keeps its part.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import packages

Draw = Callable[[Tensor, Tensor], Tensor]
"""``(sigma, next sigma)`` of a step to its noise of variance 1."""

NoiseKind = Literal["", "gaussian", "brownian", "brownian on device"]
"""What a sampler draws: nothing, independent numbers on the latent's device, or a Brownian motion's increments, on the
CPU or on the latent's device."""


def no_noise(sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """Return the noise of an empty latent, for ``planned_calls``."""
    return sigma.new_empty(0)


def gaussian(shape: Sequence[int], device: torch.device, seed: int) -> Draw:
    """Draw like ComfyUI's ``default_noise_sampler``.

    Args:
        shape: of the whole latent.
        device: where ComfyUI would sample.
        seed: the request's. ComfyUI adds 1 to it on the CPU, where the first latent's noise is from it, too.
    """
    generator = torch.Generator(device=device).manual_seed((seed + (device.type == "cpu")) % 2**64)
    return lambda sigma, next_sigma: torch.randn(tuple(shape), device=device, generator=generator)


def brownian(shape: Sequence[int], device: torch.device, seed: int, sigmas: Tensor) -> Draw:
    """Draw increments of one Brownian motion over sigma, like ComfyUI's ``BrownianTreeNoiseSampler``.

    The motion (https://github.com/google-research/torchsde) is a function of the seed alone, whatever the steps. See
    ``gaussian`` for the other arguments.
    """
    torchsde = packages.load("torchsde")  # slow to import, and not needed by other samplers

    positive = sigmas[sigmas > 0].cpu()
    start = torch.zeros(tuple(shape), device=device)
    motion = torchsde.BrownianTree(positive.min(), start, positive.max(), entropy=seed)

    def draw(sigma: Tensor, next_sigma: Tensor) -> Tensor:
        low, high = sorted((sigma.cpu(), next_sigma.cpu()))
        sign = 1.0 if sigma < next_sigma else -1.0
        increment: Tensor = motion(low, high) * sign
        return increment / (high - low).sqrt().to(device)

    return draw


class SharedNoise:
    """One draw a step for several samplers. Each steps a part of the latent.

    A sampler may be one draw ahead of the others.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw, self._count = draw, 0
        self._newest: Tensor | None = None

    def part(self, select: Callable[[Tensor], Tensor]) -> Draw:
        """Return the noise of one part. ``select`` takes it from the whole latent's noise."""
        count = 0

        def draw(sigma: Tensor, next_sigma: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return select(self._of(count, sigma, next_sigma))

        return draw

    def _of(self, index: int, sigma: Tensor, next_sigma: Tensor) -> Tensor:
        if self._newest is None or index == self._count + 1:
            self._newest, self._count = self._draw(sigma, next_sigma), index
        assert index == self._count, "a part is more than one draw behind"
        return self._newest
