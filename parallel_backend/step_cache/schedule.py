"""When a model call happens, and whether it may be forecast: numbers alone, so that all who have them agree."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .settings import StepCache

_EQUAL = 1e-5
"""By which part two sigmas differ at most that are the same but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a model call happens.

    Attributes:
        step: index of the step whose sigmas enclose the call's.
        steps: number of steps.
        time: the model's timestep, which falls from call to call.
        model: what tells transformers apart: predictions of one say nothing about the other's.
    """

    step: int
    steps: int
    time: float
    model: Hashable = ""


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
