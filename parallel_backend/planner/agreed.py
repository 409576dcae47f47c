"""A plan that rank 0 makes and all ranks know: which layouts, and why."""

import logging
from dataclasses import dataclass, replace

import msgspec

from ..distributed.collectives import gather_texts
from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..layout.modes import APPROXIMATE, AUTO, FASTEST
from ..layout.parallel_layout import ParallelLayout
from ..protocol.model_spec import ModelSpec
from .hardware.description import Hardware
from .planning import plan, rebalanced, rivals
from .request import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgreedPlan:
    """A plan on every rank.

    Attributes:
        prompt: what for.
        reason: of the choice, in a sentence.
        measured: on which machine; None if nobody has measured it.
        layouts: the choice, and those that may be as fast; none for what is taken without a plan.
        changed: how the machine differs from what was measured, for the begin of a sentence; "" if it does not. What is
            tried on one that differs is not kept on disk.
        adapted: whether it is for the memory that was there, and not for all of it.
    """

    prompt: Prompt
    reason: str
    measured: Hardware | None = None
    layouts: tuple[ParallelLayout, ...] = ()
    changed: str = ""
    adapted: bool = True

    @property
    def hardware(self) -> Hardware:
        """The machine of a plan with layouts."""
        assert self.measured is not None
        return self.measured


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of a plan: layouts, the expected best first, or none and a refusal."""

    reason: str
    layouts: tuple[str, ...] = ()


def agree(prompt: Prompt, hardware: Hardware, model: ModelSpec, world: Axis, *, whole: bool = False) -> AgreedPlan:
    """Plan on rank 0, and let all ranks know. Collective over the world.

    Args:
        whole: see ``planning.plan``.

    Raises:
        InvalidRequest: the mode is none, or the request fits in no layout. On every rank alike.
    """
    said = _said(prompt, hardware, model, whole) if world.index == 0 else None
    said = msgspec.json.decode(gather_texts(msgspec.json.encode(said).decode(), world)[0], type=_Said)
    if not said.layouts:
        raise InvalidRequest(said.reason)
    layouts = tuple(map(ParallelLayout.parse, said.layouts))
    return AgreedPlan(prompt=prompt, measured=hardware, layouts=layouts, reason=said.reason)


def rebalance(made: AgreedPlan, hardware: Hardware, world: Axis) -> AgreedPlan:
    """Let the ranks of a plan share tokens and heads as is the fastest on some hardware. Collective over the world."""
    made, layout = replace(made, measured=hardware), made.layouts[0]
    said = str(_rebalanced(made.prompt, layout, hardware)) if world.index == 0 else ""
    now = ParallelLayout.parse(gather_texts(said, world)[0])
    if now == layout:
        return made
    return replace(made, layouts=(now,), reason=f'"{now}" instead; before, {made.reason}')


def _rebalanced(prompt: Prompt, layout: ParallelLayout, hardware: Hardware) -> ParallelLayout:
    try:
        return rebalanced(prompt, layout, hardware)
    except Exception:  # other ranks wait for this one, and the layout works as it is
        log.exception("no other shares can be predicted")
        return layout


def _said(prompt: Prompt, hardware: Hardware, model: ModelSpec, whole: bool) -> _Said:
    """Plan a request on rank 0."""
    try:
        made = plan(prompt, hardware, mode=model.mode, whole=whole, all_ranks=model.mode == AUTO)
    except InvalidRequest as refusal:
        return _Said(reason=str(refusal))
    except Exception as error:  # other ranks wait for this one, and all have to know
        log.exception("no layout can be predicted")
        what = f"no layout can be predicted for this request ({type(error).__name__}, see the log of rank 0)"
        return _Said(reason=f"{what}: choose mode {AUTO}, or degrees in Parallel Layout")
    if model.mode == AUTO and not made.chosen.room.whole:
        return _Said(reason="")
    # Compiling for another layout takes longer than it saves.
    tries = model.mode in (FASTEST, APPROXIMATE) and model.compile == "off"
    others = rivals(made) if tries else ()
    return _Said(reason=made.reason, layouts=tuple(map(str, (made.chosen.layout, *others))))
