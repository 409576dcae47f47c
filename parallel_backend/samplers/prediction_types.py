"""What a model predicts, and how to compute the denoised latent from it.

The formulas come from ``CONST``, ``EPS`` and ``V_PREDICTION`` in ComfyUI's ``comfy/model_sampling.py``; a test
compares them with its code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction type. All functions take latents and a 0-dim ``sigma``.

    Attributes:
        scale_input: ``(x, sigma)`` to the model's input, from the noised latent.
        x0: ``(x, sigma, out)`` to the denoised latent, from the noised latent and the model's output.
        add_noise: ``(sigma, noise, latent)`` to the noised latent, from the clean one.
        discrete: whether the model's timesteps are indices into a table of sigmas; otherwise they are the sigma times
            a scale.
    """

    scale_input: Callable[[Tensor, Tensor], Tensor]
    x0: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_noise: Callable[[Tensor, Tensor, Tensor], Tensor]
    discrete: bool

    @property
    def flow(self) -> bool:
        """Whether the noised latent is ``(1 - sigma) * latent + sigma * noise``, of a flow model."""
        return not self.discrete


def _unit_variance(x: Tensor, sigma: Tensor) -> Tensor:
    return x / (sigma**2 + 1.0) ** 0.5


PREDICTIONS: dict[str, Prediction] = {
    "flow": Prediction(
        scale_input=lambda x, sigma: x,
        x0=lambda x, sigma, out: x - out * sigma,
        add_noise=lambda sigma, noise, latent: sigma * noise + (1.0 - sigma) * latent,
        discrete=False,
    ),
    "eps": Prediction(
        scale_input=_unit_variance,
        x0=lambda x, sigma, out: x - out * sigma,
        add_noise=lambda sigma, noise, latent: noise * sigma + latent,
        discrete=True,
    ),
    "v": Prediction(
        scale_input=_unit_variance,
        x0=lambda x, sigma, out: x / (sigma**2 + 1.0) - out * sigma / (sigma**2 + 1.0) ** 0.5,
        add_noise=lambda sigma, noise, latent: noise * sigma + latent,
        discrete=True,
    ),
}
"""Prediction types by their name in a ``Sample`` message."""


def timestep(sigma: Tensor, *, scale: float, log_sigmas: Tensor | None) -> Tensor:
    """Return the timestep of a 0-dim sigma: ``sigma * scale`` or, given a table, the index of the nearest log sigma."""
    if log_sigmas is None:
        return sigma * scale
    return torch.argmin((sigma.log() - log_sigmas).abs()).to(sigma.dtype)
