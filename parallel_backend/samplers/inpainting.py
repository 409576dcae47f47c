"""The elementwise steps around a model call: scaling the input, inpainting, and x0 from the prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .prediction_types import Prediction


@dataclass(frozen=True, kw_only=True)
class Inpainting:
    """Prepares the model's input and computes x0, in the order of ComfyUI's ``KSamplerX0Inpaint``.

    Attributes:
        prediction: what the model predicts.
        inpainting: empty without inpainting. Otherwise ``mask`` (1 where the latent is denoised, 0 where it is kept)
            and ``latent`` (the kept values), and optionally ``noise``, which is added to the kept values. Without
            ``noise`` the model gets them clean; video models that learn from the timestep what is kept expect that.
            All broadcast with the latent.
    """

    prediction: Prediction
    inpainting: Mapping[str, Tensor]

    def model_input(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the model's input for a noised latent."""
        return self.prediction.scale_input(self._with_kept_values(x, sigma), sigma)

    def x0(self, x: Tensor, sigma: Tensor, out: Tensor) -> Tensor:
        """Return the denoised latent, from the noised latent ``x`` and the model's output for it."""
        denoised = self.prediction.x0(self._with_kept_values(x, sigma), sigma, out)
        mask = self.inpainting.get("mask")
        return denoised if mask is None else denoised * mask + self.inpainting["latent"] * (1.0 - mask)

    def select(self, shape: Sequence[int], elements: Tensor) -> "Inpainting":
        """Return the same for some elements of each sample.

        Args:
            shape: shape ``[B, C, ...]`` of the latent.
            elements: flat indices into a sample; latents are then ``[B, len(elements)]``.
        """
        selected = {
            name: torch.broadcast_to(tensor, tuple(shape)).flatten(1)[:, elements]
            for name, tensor in self.inpainting.items()
        }
        return replace(self, inpainting=selected)

    def _with_kept_values(self, x: Tensor, sigma: Tensor) -> Tensor:
        mask = self.inpainting.get("mask")
        if mask is None:
            return x
        latent, noise = self.inpainting["latent"], self.inpainting.get("noise")
        kept_values = latent if noise is None else self.prediction.add_noise(sigma, noise, latent)
        return x * mask + kept_values * (1.0 - mask)
