"""``plan``: every layout with its prediction, the one to take, and the reasons in sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..engine.validation import is_refused
from ..errors import InvalidRequest
from ..layout.choice import sharing
from ..layout.modes import APPROXIMATE, AUTO, FIT, FIT_SLOW, MODES
from ..layout.parallel_layout import ParallelLayout
from .balancing import by_speed
from .enumeration import layouts, of_the_rule
from .hardware.description import Hardware
from .prediction import Prediction, predict
from .reasons import comparison, leaves_out
from .request import Prompt

GAIN, GAIN_CORES = 0.98, 0.95
"""A plan has to take at most this part of the time of the rule's layout to be taken instead: less is not certain, least
of all on CPU cores."""
_NEAR_FAST, _NEAR_SENT = 1.1, 1.5
"""How much more than the least memory a layout may take that is faster, or that sends fewer bytes."""
_NEAR, _ROOMY, _RIVALS = 1.25, 0.8, 2
"""How much slower than the choice a step may be predicted and is tried, which part of a device it may take, and how
many layouts are tried."""
_EQUAL = 1.01
"""By how much a layout of fewer devices may be slower than the fastest, and is taken instead."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What has been planned.

    Attributes:
        prompt: what for.
        hardware: on which machine.
        predictions: of all layouts, the best first; those that do not fit come last.
        chosen: the one to take.
        rule: the one that the backend takes without a plan.
        reason: why, in a sentence.
    """

    prompt: Prompt
    hardware: Hardware
    predictions: tuple[Prediction, ...]
    chosen: Prediction
    rule: Prediction
    reason: str


def plan(prompt: Prompt, hardware: Hardware, *, mode: str = AUTO, whole: bool = False, all_ranks: bool = False) -> Plan:
    """Predict every layout for a prompt on a machine, and choose one.

    Args:
        whole: whether to leave out layouts that split weights, and approximate ones.
        all_ranks: whether to take no layout of fewer ranks than the rule's. The reason tells if one would be faster.

    Raises:
        InvalidRequest: the mode is none, or the prompt fits in no layout. The message names what would work.
    """
    if mode not in MODES:
        raise InvalidRequest(f"mode {mode!r} does not exist; choose one of {', '.join(MODES)}")
    rule = rule_prediction(prompt, hardware)
    approximate = mode == APPROXIMATE and prompt.loop and not whole  # single calls are exact, and no faster
    every = layouts(prompt, hardware, approximate=approximate)
    found = [predict(prompt, layout, hardware) for layout in every if not (whole and layout.splits_weights)]
    key = _order(mode, found)
    ordered = sorted(found, key=lambda each: (not each.room.fits, key(each), each.layout.ranks))
    fitting, least = [each for each in ordered if each.room.fits], rule.layout.ranks if all_ranks else 1
    able = [each for each in fitting if each.layout.ranks >= least]
    if not able:
        best = min((each for each in found if each.layout.ranks >= least), key=lambda each: each.room.taken)
        raise InvalidRequest(
            f"{prompt.model.name} of this size fits on {hardware.name} in no layout ({best.room.refusal}): make a "
            "smaller or shorter latent, use more devices, or choose a smaller model"
        )
    chosen, fewer = (
        some[0] if whole and rule.layout.splits_weights else choose(some, rule, mode, hardware)
        for some in (able, fitting)
    )
    faster = fewer.layout.ranks < chosen.layout.ranks and fewer.seconds <= GAIN * chosen.seconds
    reason = comparison(chosen, rule, fitting, hardware) + (leaves_out(fewer, chosen, hardware) if faster else "")
    return Plan(
        prompt=prompt, hardware=hardware, predictions=tuple(ordered), chosen=chosen, rule=rule,
        reason=reason,
    )  # fmt: skip


def rivals(made: Plan) -> tuple[ParallelLayout, ...]:
    """Return the layouts to be tried besides the chosen one: exact, and predicted nearly as fast.

    All of them hold whole weights on devices that the choice uses, too. Others would have to be read before they could
    be tried. What is taken without a plan comes first.
    """
    chosen, least = made.chosen, min(device.memory for device in made.hardware.devices)
    if chosen.layout.splits_weights or chosen.layout.approximation:
        return ()
    near = [
        each.layout
        for each in made.predictions
        if each.room.whole and each.room.taken <= _ROOMY * least and each.layout.ranks <= chosen.layout.ranks
        and each.step.seconds <= _NEAR * chosen.step.seconds and each.layout != chosen.layout
        and not each.layout.splits_weights and not each.layout.approximation
    ]  # fmt: skip
    near.sort(key=lambda layout: layout != made.rule.layout)
    return tuple(near[:_RIVALS])


def rebalanced(prompt: Prompt, layout: ParallelLayout, hardware: Hardware) -> ParallelLayout:
    """Return a layout with the shares that are predicted to be the fastest: its own, equal ones, or those by speed."""
    even = replace(layout, balance=(), attention_balance=())
    shares = [each for each in (layout, even, by_speed(even, hardware)) if each and _works(prompt, each)]
    fitting = [each for each in (predict(prompt, layout, hardware) for layout in shares) if each.room.fits]
    return min(fitting, key=lambda each: each.seconds).layout if fitting else layout


def rule_prediction(prompt: Prompt, hardware: Hardware) -> Prediction:
    """Return the layout that the backend takes without a plan: that for roomy devices, or one that shares weights."""
    roomy = of_the_rule(prompt, hardware)
    candidates = [roomy, *sharing(roomy)]
    predicted = [predict(prompt, layout, hardware) for layout in candidates[:1]]
    if predicted[0].room.whole:
        return predicted[0]
    others = [predict(prompt, layout, hardware) for layout in candidates[1:] if _works(prompt, layout)]
    return next((each for each in others if each.room.whole), predicted[0])


def _works(prompt: Prompt, layout: ParallelLayout) -> bool:
    return not is_refused(layout, prompt.plan(layout).workload(prompt.dtype.itemsize))


def choose(fitting: Sequence[Prediction], rule: Prediction, mode: str, hardware: Hardware) -> Prediction:
    """Choose among layouts that fit, the best first. What is chosen is never predicted worse than the rule's layout."""
    best = fitting[0]
    if mode in (FIT, FIT_SLOW):
        return best
    near = [each for each in fitting if each.seconds <= _EQUAL * best.seconds]
    fewest = min(near, key=lambda each: each.layout.ranks)
    if not rule.room.fits:
        return fewest
    certain = not hardware.cores
    most = (GAIN if certain else GAIN_CORES) * rule.seconds
    if certain and fewest.layout.ranks < rule.layout.ranks and fewest.seconds <= rule.seconds:
        return fewest
    return next((each for each in (fewest, best) if each.seconds <= most), None) or _same(fitting, rule)


def _same(fitting: Sequence[Prediction], rule: Prediction) -> Prediction:
    return next((each for each in fitting if each.layout == rule.layout), rule)


def _order(mode: str, found: Sequence[Prediction]) -> Callable[[Prediction], tuple[float, ...]]:
    """Return what orders the layouts in a mode: the best has the least."""
    if mode not in (FIT, FIT_SLOW):
        return lambda each: (each.seconds,)
    least = min((each.room.taken for each in found if each.room.whole), default=1)

    def little(each: Prediction) -> tuple[float, ...]:
        """Without blocks that stream, near the least memory; then the fastest, or what sends the fewest bytes."""
        near = _NEAR_SENT if mode == FIT_SLOW else _NEAR_FAST
        second = each.sent if mode == FIT_SLOW else each.seconds
        return (bool(each.room.streams), each.room.taken > near * least, second, each.seconds)

    return little
