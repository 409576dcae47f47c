"""Why a layout is as fast as it is, and why it is taken, in sentences."""

from collections.abc import Mapping, Sequence

from ..layout.modes import FASTEST
from ..layout.parallel_layout import ParallelLayout
from ..loading.room import size
from .hardware.description import Hardware
from .prediction import Prediction

_NOTICEABLE = 0.05
"""A part of a step that is worth a word."""


def reason(prediction: Prediction) -> str:
    """Return what a layout's step is made of, in a sentence."""
    if not prediction.room.fits:
        return f"does not fit: {prediction.room.refusal}"
    step, total = prediction.step, prediction.step.seconds
    parts = [_exchange(prediction)] if prediction.layout.ranks > 1 else ["sends nothing"]
    if prediction.layout.balance:
        parts.insert(0, "gives slower or smaller devices less")
    if step.streaming > _NOTICEABLE * total:
        parts.append(f"waits {_percent(step.streaming / total)} of a step for blocks that stream")
    elif prediction.room.streams:
        parts.append(f"streams {size(prediction.room.streams)} in each step, which computing hides")
    if step.host >= total > 0:
        parts.append("its shares are so small that the host is too slow for the devices")
    if prediction.layout.approximation:
        parts.append(f"is approximate ({prediction.layout.approximation})")
    return ", ".join(parts)


def _exchange(prediction: Prediction) -> str:
    share = prediction.step.exchange / max(prediction.step.seconds, 1e-12)
    sent = size(prediction.sent)
    if share < _NOTICEABLE:
        return f"sends {sent} in a step, which takes next to no time"
    return f"sends {sent} in a step, which takes {_percent(share)} of it"


def comparison(chosen: Prediction, rule: Prediction, fitting: Sequence[Prediction], hardware: Hardware) -> str:
    """Return why a layout is taken, in a sentence."""
    devices = len(hardware.devices)
    words = f'"{chosen.layout}" takes about {seconds_text(chosen.seconds)}: {reason(chosen)}'
    one = next((each for each in fitting if each.layout == ParallelLayout()), None)
    if one and chosen.layout.ranks > 1 and chosen.seconds > 0:
        words += f"; {one.seconds / chosen.seconds:.2f} times as fast as one device"
    if chosen.layout.ranks < devices:
        words += f"; {chosen.layout.ranks} of {devices} devices, since more would not be clearly faster"
    if rule.layout == chosen.layout:
        return f"{words}; it is also what is taken without a plan"
    if not rule.room.fits:
        return f'{words}; "{rule.layout}", which is taken without a plan, does not fit'
    gain = rule.seconds / chosen.seconds if chosen.seconds else 1.0
    if gain > 1:
        return f'{words}; {_percent(1 - 1 / gain)} less than "{rule.layout}", which is taken without a plan'
    return f'{words}; without a plan "{rule.layout}" is taken, with {seconds_text(rule.seconds)}'


def leaves_out(fewer: Prediction, chosen: Prediction, hardware: Hardware) -> str:
    """Return that a layout of fewer devices is faster than the chosen one, for the end of a sentence."""
    devices, less = len(hardware.devices), 1 - fewer.seconds / chosen.seconds
    words = f'"{fewer.layout}" on {fewer.layout.ranks} of {devices} devices would take {_percent(less)} less'
    return f"; {words}: mode {FASTEST} may use fewer"


def tried(layout: ParallelLayout, seconds: Mapping[ParallelLayout, float]) -> str:
    """Return why a layout is taken that was tried beside others, in a sentence."""
    others = [f'"{each}" {seconds_text(taken)}' for each, taken in seconds.items() if each != layout]
    words = f'"{layout}" takes {seconds_text(seconds[layout])} a step'
    return f"{words}; tried in the first steps, {', '.join(others)}" if others else words


def changed(speeds: Sequence[float]) -> str:
    """Return which ranks compute slower or faster than when they were measured, in words."""
    parts = [f"rank {rank} at {_percent(speed)}" for rank, speed in enumerate(speeds) if speed != 1]
    return f"now {' and '.join(parts)} of the speed that was measured: "


def seconds_text(seconds: float) -> str:
    """Return a time in words."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
