"""What a model predicts, and how that gives the denoised latent: ComfyUI's conventions, held to its code by a test.

The algorithms are those of ``CONST``, ``EPS`` and ``V_PREDICTION`` in ``comfy/model_sampling.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """All take latents and a 0-dim ``sigma``.

    Attributes:
        scaled: what the model is given of the noised latent; x0: the denoised latent of the noised one, sigma and the
            prediction; noised: a clean latent with noise, from sigma, noise and latent.
        discrete: whether the model's timesteps are places in a table of sigmas, or the sigma times a scale.
    """

    scaled: Callable[[Tensor, Tensor], Tensor]
    x0: Callable[[Tensor, Tensor, Tensor], Tensor]
    noised: Callable[[Tensor, Tensor, Tensor], Tensor]
    discrete: bool


def _unit_variance(x: Tensor, sigma: Tensor) -> Tensor:
    return x / (sigma**2 + 1.0) ** 0.5


PREDICTIONS: dict[str, Prediction] = {
    "flow": Prediction(
        scaled=lambda x, sigma: x,
        x0=lambda x, sigma, out: x - out * sigma,
        noised=lambda sigma, noise, latent: sigma * noise + (1.0 - sigma) * latent,
        discrete=False,
    ),
    "eps": Prediction(
        scaled=_unit_variance,
        x0=lambda x, sigma, out: x - out * sigma,
        noised=lambda sigma, noise, latent: noise * sigma + latent,
        discrete=True,
    ),
    "v": Prediction(
        scaled=_unit_variance,
        x0=lambda x, sigma, out: x / (sigma**2 + 1.0) - out * sigma / (sigma**2 + 1.0) ** 0.5,
        noised=lambda sigma, noise, latent: noise * sigma + latent,
        discrete=True,
    ),
}
"""By the name that a ``Sample`` has for it."""


def timestep(sigma: Tensor, *, scale: float, log_sigmas: Tensor | None) -> Tensor:
    """The timestep of a 0-dim sigma: its place in the table if there is one, else the sigma times ``scale``."""
    if log_sigmas is None:
        return sigma * scale
    return torch.argmin((sigma.log() - log_sigmas).abs()).to(sigma.dtype)
