"""A plan as a table, or as JSON."""

from typing import Any

import msgspec

from ..loading.room import size
from .planning import Plan
from .prediction import Prediction
from .reasons import reason, seconds_text

SHOWN = 12
"""Rows of a table; all with ``--all``."""


def table(plan: Plan, *, every: bool = False) -> str:
    """Return a plan as text: what for, the layouts, the choice."""
    prompt, rows = plan.prompt, list(plan.predictions)
    latent = "x".join(map(str, prompt.size))
    guidance = "with guidance" if prompt.guided else "without guidance"
    head = (
        f"{prompt.model.name}, latent {latent}, {prompt.steps} steps {guidance}, {prompt.samples} at once, "
        f"on {plan.hardware.name}"
    )
    shown = rows if every else _shown(plan, rows)
    lines = [_line(each, plan) for each in shown]
    hidden = f"{len(rows) - len(shown)} more layouts: --all shows them" if len(shown) < len(rows) else ""
    columns = f"{'layout':34} {'prompt':>9} {'step':>9} {'VAE':>8} {'load':>8} {'a device':>9}  why"
    return "\n".join(filter(None, [head, "", columns, *lines, hidden, "", f"Choice: {plan.reason}."]))


def _shown(plan: Plan, rows: list[Prediction]) -> list[Prediction]:
    kept = rows[:SHOWN]
    return kept + [each for each in rows[SHOWN:] if each.layout in (plan.chosen.layout, plan.rule.layout)]


def _line(each: Prediction, plan: Plan) -> str:
    mark = "*" if each.layout == plan.chosen.layout else "=" if each.layout == plan.rule.layout else " "
    decoding = "-" if each.decoding is None else seconds_text(each.decoding)
    taken = size(each.room.weights + each.room.work)
    return (
        f"{mark} {each.layout!s:32} {seconds_text(each.seconds):>9} {seconds_text(each.step.seconds):>9} "
        f"{decoding:>8} {seconds_text(each.loading):>8} {taken:>9}  {reason(each)}"
    )


def as_json(plan: Plan) -> str:
    """Return a plan as JSON."""
    rows = [_row(each, plan) for each in plan.predictions]
    found = {"hardware": plan.hardware.name, "chosen": str(plan.chosen.layout), "rule": str(plan.rule.layout),
             "reason": plan.reason, "layouts": rows}  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _row(each: Prediction, plan: Plan) -> dict[str, Any]:
    step = each.step
    return {
        "layout": str(each.layout), "seconds": each.seconds, "step": step.seconds, "layers": step.layers,
        "attention": step.attention, "exchange": step.exchange, "streaming": step.streaming, "host": step.host,
        "decoding": each.decoding, "loading": each.loading, "sent_bytes": each.sent, "weights": each.room.weights,
        "work": each.room.work, "fits": each.room.fits, "why": reason(each),
    }  # fmt: skip
