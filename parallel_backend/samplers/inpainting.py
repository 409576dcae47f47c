"""What is elementwise around a prediction: noise, inpainting, and the x0 that samplers ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .prediction_types import Prediction


@dataclass(frozen=True, kw_only=True)
class Inpainting:
    """The order is that of ComfyUI's ``KSamplerX0Inpaint`` around ``cfg_function``.

    Attributes:
        inpainting: nothing, or ``mask`` and ``latent``, and ``noise`` where what is kept is noised as the rest.
            Without it what is kept is given to the model clean, as video models that know by the timestep what is
            kept are used to. All broadcast with the latent.
    """

    prediction: Prediction
    inpainting: Mapping[str, Tensor]

    def given(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What the model is given of a noised latent."""
        return self.prediction.scaled(self._kept(x, sigma), sigma)

    def x0(self, x: Tensor, sigma: Tensor, out: Tensor) -> Tensor:
        """The denoised latent, from the noised one and what the model predicts of what it was given."""
        denoised = self.prediction.x0(self._kept(x, sigma), sigma, out)
        mask = self.inpainting.get("mask")
        return denoised if mask is None else denoised * mask + self.inpainting["latent"] * (1.0 - mask)

    def part(self, shape: Sequence[int], elements: Tensor) -> "Inpainting":
        """The same for some elements of each sample of a latent of that shape, by their flat index."""
        chosen = {
            name: torch.broadcast_to(tensor, tuple(shape)).flatten(1)[:, elements]
            for name, tensor in self.inpainting.items()
        }
        return replace(self, inpainting=chosen)

    def _kept(self, x: Tensor, sigma: Tensor) -> Tensor:
        mask = self.inpainting.get("mask")
        if mask is None:
            return x
        latent, noise = self.inpainting["latent"], self.inpainting.get("noise")
        kept = latent if noise is None else self.prediction.noised(sigma, noise, latent)
        return x * mask + kept * (1.0 - mask)
