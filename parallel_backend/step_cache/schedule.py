"""When a model call happens, and whether it may be forecast: numbers alone, so that all who have them agree."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .settings import StepCache

_EQUAL = 1e-5
"""By which part two sigmas differ at most that are the same but for rounding."""
_WITHIN = 0.99
"""The part of a step that is behind a call at most: after all of it, the next step begins."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a model call happens.

    Attributes:
        position: index of the step whose sigmas enclose the call's, and the part of the step that is behind it.
        steps: number of steps.
        model: what tells transformers apart: predictions of one say nothing about the other's.
    """

    position: float
    steps: int
    model: Hashable = ""

    @property
    def step(self) -> int:
        """The index of the step."""
        return int(self.position)


def position_of(sigma: float, sigmas: Sequence[float]) -> float:
    """Return the position of a call.

    Args:
        sigmas: of the schedule, one more than there are steps.
    """
    step = step_of(sigma, sigmas)
    start, end = sigmas[step : step + 2]
    return step + min(max((start - sigma) / (start - end), 0.0), _WITHIN) if start > end else float(step)


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """Return the index of the last step that begins at ``sigma`` or above it; 0 if there is none.

    Args:
        sigmas: of the schedule, one more than there are steps.
    """
    begun = [step for step, start in enumerate(sigmas[:-1]) if start >= sigma * (1 - _EQUAL)]
    return begun[-1] if begun else 0


def may_forecast(cache: StepCache, moment: Moment, *, computed: int, last: int) -> bool:
    """Whether a call may be forecast.

    Args:
        computed: steps that have been computed since the beginning, or since all was forgotten.
        last: the index of the last of them.
    """
    within = cache.first <= moment.step < moment.steps - cache.final
    return within and computed >= cache.warmup and 0 < moment.step - last < cache.interval
