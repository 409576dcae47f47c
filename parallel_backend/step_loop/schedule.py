"""Which calls of a step loop are exact, and what attention sees in the others."""

from collections.abc import Sequence
from enum import Enum, auto

from ..denoiser.attention_views import DisplacedView, FullView, LocalPatchView


def whole_calls(steps: Sequence[int | None], experts: Sequence[str], warmup: int) -> list[bool]:
    """Which calls are on the whole latent: those of the first steps, and of the first with another expert.

    Args:
        steps: by call the step that begins with it; None for a second look within one.
        experts: by call the name of the transformer.
    """
    whole, begun, current = [], 0, 0
    for i, step in enumerate(steps):
        current = current if step is None else step
        begun = current if i and experts[i] != experts[i - 1] else begun
        whole.append(current - begun < warmup)
    return whole


class CallKind(Enum):
    """What a call of a step loop sees of the other patches."""

    EVERYTHING = auto()
    GATHERED = auto()
    """Everything, which is kept for the next call."""
    DISPLACED = auto()
    LAST = auto()
    """As ``DISPLACED``, before a call that needs nothing of it."""
    ALONE = auto()


def call_kinds(stale: str, whole: Sequence[bool]) -> list[CallKind]:
    """By call.

    Args:
        stale: of the layout; whole: by call, whether it is to be exact all the same.
    """
    if stale != "previous":
        return [CallKind.ALONE if stale and not exact else CallKind.EVERYTHING for exact in whole]
    following = [*whole[1:], True]
    by_whole = {True: (CallKind.EVERYTHING, CallKind.GATHERED), False: (CallKind.LAST, CallKind.DISPLACED)}
    return [by_whole[exact][not after] for exact, after in zip(whole, following, strict=True)]


class ViewSchedule:
    """The views of the calls of a step loop, one after the other."""

    def __init__(self, everything: FullView, calls: Sequence[CallKind]) -> None:
        self._calls = iter(calls)
        self._displaced = DisplacedView(everything.mesh, everything.splits)
        self._everything, self._alone = everything, LocalPatchView(everything.mesh, everything.splits)

    def next(self) -> FullView:
        """That of the next call."""
        kind = next(self._calls)
        if kind in (CallKind.EVERYTHING, CallKind.GATHERED):  # what was kept is of no use any more
            self._displaced.finish()
        if kind is CallKind.EVERYTHING:
            return self._everything
        if kind is CallKind.ALONE:
            return self._alone
        self._displaced.fresh, self._displaced.renews = kind is CallKind.GATHERED, kind is not CallKind.LAST
        return self._displaced

    def finish(self) -> None:
        """Wait for what is under way, after the last call."""
        self._displaced.finish()
