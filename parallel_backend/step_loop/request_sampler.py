"""The sampler that a ``Sample`` request names, with the noise of its seed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..protocol.messages import Sample
from ..samplers.interface import ModelCall, Sampler, Start, planned_calls
from ..samplers.noise import Draw, SharedNoise, brownian, gaussian, no_noise
from ..samplers.prediction_types import PREDICTIONS
from ..samplers.samplers import SAMPLERS
from ..samplers.stochastic import Sampling


class RequestSampler:
    """Makes the samplers of a request. Each steps a part of the latent, and all see the noise of the same draws.

    Args:
        sigmas: of the request, on the device of the latent.
        shape: of the whole latent.
    """

    def __init__(self, message: Sample, sigmas: Tensor, shape: Sequence[int]) -> None:
        self.message, self.sigmas, self.shape = message, sigmas, shape
        self._kind = SAMPLERS[message.sampler]
        self._noise: SharedNoise | None = None

    def calls(self) -> list[ModelCall]:
        """Return all calls that the sampler will make, with empty latents."""
        return list(planned_calls(self._bound(no_noise), self.sigmas, Start(step=self.message.first_step)))

    def first_call(self, x: Tensor, start: Start) -> ModelCall:
        """Return the first call for a noised latent."""
        return next(self._bound(no_noise)(x, self.sigmas, start))

    def of_part(self, select: Callable[[Tensor], Tensor]) -> Sampler:
        """Return the sampler of one part of the latent. ``select`` takes that part from the whole latent's noise."""
        if self._kind.noise and self._noise is None:
            draw = self._draw()
            self._draw_earlier(draw)
            self._noise = SharedNoise(draw)
        return self._bound(self._noise.part(select) if self._noise else no_noise)

    def _bound(self, noise: Draw) -> Sampler:
        message = self.message
        prediction = PREDICTIONS[message.prediction]
        return self._kind.bind(Sampling(prediction=prediction, first_sigma=message.first_sigma, noise=noise))

    def _draw_earlier(self, draw: Draw) -> None:
        """Draw, and forget, what the steps before the first one draw."""

        def forgotten(sigma: Tensor, next_sigma: Tensor) -> Tensor:
            draw(sigma, next_sigma)
            return sigma.new_empty(0)

        for call in planned_calls(self._bound(forgotten), self.sigmas):
            if call.step == self.message.first_step:
                return

    def _draw(self) -> Draw:
        message, device = self.message, self.sigmas.device
        drawn_on = device if message.noise_device == device.type else torch.device("cpu")
        if self._kind.noise == "gaussian":
            draw = gaussian(self.shape, drawn_on, message.seed)
        else:
            drawn_on = drawn_on if self._kind.noise == "brownian on device" else torch.device("cpu")
            draw = brownian(self.shape, drawn_on, message.seed, self.sigmas)
        return lambda sigma, next_sigma: draw(sigma, next_sigma).to(device) * message.noise_scale
