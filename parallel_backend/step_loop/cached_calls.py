"""The step cache of a whole step loop: every rank keeps the guided predictions and decides by the calls alone."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..protocol.messages import FORECASTS
from ..samplers.samplers import SAMPLERS
from ..step_cache.history import StepHistory
from ..step_cache.schedule import Moment, step_of
from ..step_cache.settings import StepCache
from .sampling_context import SamplingContext

X0 = "x0"
Predict = Callable[[Tensor, Tensor], Tensor]
"""``(x, sigma)`` to the guided prediction, computed."""


class CachedCalls:
    """Answers the calls of one step loop. The forecasts of all ranks have the same bits, and no rank asks another.

    Where a sampler adds noise in each step, the denoised latent is forecast, which does not depend on that noise;
    elsewhere the prediction, whose forecast is better.
    """

    def __init__(self, cache: StepCache, setting: SamplingContext, predict: Predict) -> None:
        self._setting, self._predict = setting, predict
        self._history = StepHistory[str](cache)
        self._noisy = bool(SAMPLERS[setting.message.sampler].noise)
        self._moments = _moments(setting)

    def x0(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the guided x0 of the next call."""
        moment = next(self._moments)
        if self._history.skips(moment):
            value = self._history.forecast(moment)[X0]
            return value if self._noisy else self._setting.x0(x, sigma, value)
        out = self._predict(x, sigma)
        x0 = self._setting.x0(x, sigma, out)
        self._history.add(moment, {X0: x0 if self._noisy else out})
        return x0

    def counts(self) -> dict[str, Tensor]:
        """Return how many calls were forecast, and how many there were."""
        return {FORECASTS: torch.tensor([self._history.forecasts, self._history.calls])}


def _moments(setting: SamplingContext) -> Iterator[Moment]:
    """Yield when each call of the loop is. The host waits for the device once, before the first."""
    sigmas, calls = setting.sigmas.tolist(), setting.calls()[0]
    times = [setting.time(call.sigma) for call in calls]
    models = [setting.denoiser.experts.name(time) for time in times]
    numbers = torch.stack([torch.stack([call.sigma, time]) for call, time in zip(calls, times, strict=True)]).tolist()
    for (sigma, time), model in zip(numbers, models, strict=True):
        yield Moment(step=step_of(sigma, sigmas), steps=len(sigmas) - 1, time=time, model=model)
