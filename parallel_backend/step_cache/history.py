"""What one sampling has computed, from which later calls are forecast."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from .forecast import forecast, weights
from .schedule import Moment, may_forecast
from .settings import StepCache

K = TypeVar("K", bound=Hashable)
_SAME = 1e-3
"""Positions that differ by less are those of one place, but for rounding."""


@dataclass(frozen=True, kw_only=True)
class _Computed(Generic[K]):
    """The predictions of a call, by what they are of."""

    position: float
    values: Mapping[K, Tensor]


class StepHistory(Generic[K]):
    """The last computed predictions of a sampling.

    Whoever has the same calls in the same order decides the same and forecasts the same bits: it depends on no
    value that was computed.

    Attributes:
        calls: calls so far.
        forecasts: those of them that were forecast.
    """

    def __init__(self, cache: StepCache) -> None:
        self.cache, self.calls, self.forecasts = cache, 0, 0
        self._model: Hashable = None
        self._computed: list[_Computed[K]] = []
        self._steps, self._last = 0, -1

    def skips(self, moment: Moment) -> bool:
        """Whether the next call is to be forecast.

        All is forgotten where the call is of another transformer, or of a sampling that begins or goes back.
        """
        if moment.model != self._model or moment.step < self._last:
            self._model = moment.model
            self._forget()
        return may_forecast(self.cache, moment, computed=self._steps, last=self._last)

    @property
    def fixed(self) -> bool:
        """Whether ``skips`` decides alone; otherwise it says what may be forecast."""
        return self.cache.method == "schedule"

    def forecast(self, moment: Moment) -> dict[K, Tensor]:
        """Return the forecast of a call that ``skips`` allows."""
        self.calls, self.forecasts = self.calls + 1, self.forecasts + 1
        factors = weights([each.position for each in self._computed], moment.position)
        return {
            name: forecast([each.values[name] for each in self._computed], factors)
            for name in self._computed[-1].values
        }

    def add(self, moment: Moment, values: Mapping[K, Tensor]) -> None:
        """Keep the predictions of a call that was computed, for which ``skips`` was asked.

        A call at the position of an earlier one, as of a sampler that looks ahead, takes its place.
        """
        self.calls += 1
        earlier = [each for each in self._computed if each.position < moment.position - _SAME]
        self._computed = [*earlier, _Computed(position=moment.position, values=dict(values))][-1 - self.cache.order :]
        self._steps += moment.step != self._last
        self._last = moment.step

    def _forget(self) -> None:
        self._computed, self._steps, self._last = [], 0, -1
