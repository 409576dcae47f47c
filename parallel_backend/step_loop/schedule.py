"""Which calls of a step loop are exact, and what attention sees in each call."""

from collections.abc import Sequence
from enum import Enum, auto

from ..denoiser.attention_views import DisplacedView, FullView, LocalPatchView


def whole_calls(steps: Sequence[int | None], experts: Sequence[str], warmup: int) -> list[bool]:
    """Whether each call runs on the whole latent, exactly.

    The calls of the first ``warmup`` steps do, and again of the first steps after a switch to another expert.
    Where earlier steps have run elsewhere, at least the first step does.

    Args:
        steps: by call, the step that begins with it; None for a second call within a step.
        experts: by call, the name of the transformer.
    """
    begun = current = steps[0] or 0
    whole, exact = [], max(1, warmup - begun) if begun else warmup
    for i, step in enumerate(steps):
        current = current if step is None else step
        if i and experts[i] != experts[i - 1]:
            begun, exact = current, warmup
        whole.append(current - begun < exact)
    return whole


class CallKind(Enum):
    """What one call of a step loop sees of other ranks' patches."""

    EVERYTHING = auto()
    """All tokens, exactly."""
    GATHERED = auto()
    """All tokens, exactly, and their keys and values are kept for the next call."""
    DISPLACED = auto()
    """Keys and values of the call before; this call's are sent for the next one."""
    LAST = auto()
    """Keys and values of the call before; the next call needs none of this call's."""
    ALONE = auto()
    """Nothing."""


def call_kinds(stale: str, whole: Sequence[bool]) -> list[CallKind]:
    """The kind of each call."""
    if stale != "previous":
        return [CallKind.ALONE if stale and not exact else CallKind.EVERYTHING for exact in whole]
    following = [*whole[1:], True]
    by_whole = {True: (CallKind.EVERYTHING, CallKind.GATHERED), False: (CallKind.LAST, CallKind.DISPLACED)}
    return [by_whole[exact][not after] for exact, after in zip(whole, following, strict=True)]


class ViewSchedule:
    """Gives each call of a step loop its attention view."""

    def __init__(self, full_view: FullView, kinds: Sequence[CallKind]) -> None:
        self._kinds = iter(kinds)
        self._full = full_view
        self._displaced = DisplacedView(full_view.mesh, full_view.splits)
        self._local = LocalPatchView(full_view.mesh, full_view.splits)

    def next(self) -> FullView:
        """The view of the next call."""
        kind = next(self._kinds)
        if kind in (CallKind.EVERYTHING, CallKind.GATHERED):
            self._displaced.finish()  # no later call needs the keys and values kept so far
        if kind is CallKind.EVERYTHING:
            return self._full
        if kind is CallKind.ALONE:
            return self._local
        self._displaced.fresh, self._displaced.renews = kind is CallKind.GATHERED, kind is not CallKind.LAST
        return self._displaced

    def finish(self) -> None:
        """Wait for transfers still in flight, after the last call."""
        self._displaced.finish()
