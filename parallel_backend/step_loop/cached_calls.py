"""The step cache of a whole step loop: every rank keeps the guided predictions and decides by the calls alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ..denoiser.change_gate import ChangeGate
from ..denoiser.denoiser import Inputs
from ..protocol.messages import FORECASTS
from ..step_cache.history import StepHistory
from ..step_cache.schedule import Moment, position_of
from ..step_cache.settings import StepCache
from .sampling_context import SamplingContext

GUIDED = "guided"
Shards = Callable[[Mapping[int, Inputs]], dict[int, Tensor] | None]
Predict = Callable[[Tensor, Tensor, Shards | None], Tensor | None]
"""``(x, sigma, shards)`` to the guided prediction; None if ``shards``, which stands for the denoiser's own, is None."""


class CachedCalls:
    """Answers the calls of one step loop. The forecasts of all ranks have the same bits.

    With a schedule no rank asks another.
    """

    def __init__(self, cache: StepCache, setting: SamplingContext, predict: Predict) -> None:
        self._setting, self._predict = setting, predict
        self._history = StepHistory[str](cache)
        self._moments = _moments(setting)
        denoiser = setting.denoiser
        self._gate = ChangeGate(cache, denoiser.mesh.all_ranks, denoiser.plan)

    def x0(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the guided x0 of the next call."""
        moment = next(self._moments)
        may = self._history.skips(moment)
        out: Tensor | None = None
        if not self._history.fixed:
            shards = partial(self._setting.denoiser.shards_unless, gate=self._gate, may=may)
            out = self._predict(x, sigma, shards)
        elif not may:
            out = self._predict(x, sigma, None)
        if out is None:
            out = self._history.forecast(moment)[GUIDED]
        else:
            self._history.add(moment, {GUIDED: out})
        return self._setting.x0(x, sigma, out)

    def counts(self) -> dict[str, Tensor]:
        """Return how many calls were forecast, and how many there were."""
        return {FORECASTS: torch.tensor([self._history.forecasts, self._history.calls])}


def _moments(setting: SamplingContext) -> Iterator[Moment]:
    """Yield when each call of the loop is. The host waits for the device once, before the first."""
    sigmas, calls = setting.sigmas.tolist(), setting.calls()[0]
    models = [setting.denoiser.experts.name(setting.time(call.sigma)) for call in calls]
    for sigma, model in zip(torch.stack([call.sigma for call in calls]).tolist(), models, strict=True):
        yield Moment(position=position_of(sigma, sigmas), steps=len(sigmas) - 1, model=model)
