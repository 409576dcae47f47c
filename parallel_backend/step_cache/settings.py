"""``StepCache``: which steps of a sampling are forecast instead of computed, as a request says it."""

from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidRequest

LIMITS = {"interval": (1, 16), "order": (0, 2), "warmup": (1, 10000), "first": (0, 10000), "final": (0, 10000)}
"""Smallest and largest value of each number."""
MAX_THRESHOLD = 10.0
Method = Literal["schedule", "residual", "change"]
METHODS: tuple[Method, ...] = ("schedule", "residual", "change")
"""What decides: the step's number; the change of the first block's residual since the last computed step; or the
changes of its modulated input, added up since then."""
PRESETS = ("safe", "fast")
"""Names of settings that depend on the number of steps."""
_FROM = {
    "safe": {40: (3, 2, 1, 0), 12: (2, 1, 1, 1)},
    "fast": {40: (4, 1, 1, 0), 20: (3, 1, 1, 1), 12: (2, 1, 1, 1)},
}
"""By preset: from how many steps on which interval, order, warm-up and computed steps at the end. Fewer steps are too
far from one another to forecast any, and many are so close that the last one may be forecast."""


@dataclass(frozen=True, kw_only=True)
class StepCache:
    """Which steps are computed, and how the others are forecast.

    A forecast is the polynomial in the steps through the last computed predictions, as in TaylorSeer
    (https://arxiv.org/abs/2503.06923), but of the whole stack of blocks.

    Attributes:
        interval: of so many steps one is computed and the others are forecast, with other methods than ``schedule``
            at least one. 1 forecasts none.
        order: degree of the polynomial: 0 repeats the last prediction. It is lower until there are enough of them.
        warmup: steps that are computed at the start, and again after a switch of transformers and after a recovery.
        first: index of the first step that may be forecast.
        final: steps at the end that are computed.
        method: see ``METHODS``.
        threshold: the relative change below which a step is forecast; only for other methods than ``schedule``.

    Raises:
        InvalidRequest: a number is out of its range.
    """

    interval: int
    order: int = 1
    warmup: int = 1
    first: int = 0
    final: int = 1
    method: Method = "schedule"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequest(f"step cache {name}={value}: {least} to {most} works")
        _check_method(self.method)
        if not 0.0 <= self.threshold <= MAX_THRESHOLD:
            raise InvalidRequest(f"step cache threshold={self.threshold}: 0 to {MAX_THRESHOLD:g} works")


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise InvalidRequest(f"step cache method {method!r} does not exist: {', '.join(METHODS)} do")


def preset(name: str, steps: int) -> StepCache | None:
    """Return the settings of a preset for a number of steps; None if all of them are computed.

    Raises:
        InvalidRequest: there is no such preset.
    """
    if name not in PRESETS:
        raise InvalidRequest(f"step cache {name!r} does not exist: {', '.join(PRESETS)} do")
    for least, (interval, order, warmup, final) in _FROM[name].items():
        if steps >= least:
            return StepCache(interval=interval, order=order, warmup=warmup, final=final)
    return None
