"""Lines in the log of requests, for ended requests."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from ..layout.parallel_layout import ParallelLayout
from ..protocol import request_log
from ..protocol.frames import TensorMeta
from ..protocol.messages import Forward, RankRequest, Sample
from ..protocol.rank_control import DONE
from ..protocol.status import LoadedModel
from .request_queue import QueuedRequest, chosen_layout

_LATENTS = {
    "Sample": "x", "Forward": "0.hidden_states", "Decode": "latent", "Encode": "pixels", "EncodeText": "ids",
}  # fmt: skip
"""By kind of request, the tensor whose shape is logged as its size."""
_STEPS = "sigmas"
_IN_MEMORY = "/proc/"
"""How paths of models begin that another process holds in memory."""
_MAX_NAME = 200
"""Characters that are logged of what a client names."""


def of_request(request: QueuedRequest, outcome: str, models: Sequence[LoadedModel]) -> str:
    """Return the line of a request.

    Args:
        request: has been queued.
        outcome: ``DONE`` or a code of ``errors``.
        models: rank 0's models, which know the layout that the ranks chose.
    """
    now, ran, finished = time.monotonic(), request.ran_at, request.finished
    until = now if ran is None else ran
    first = until if request.first_at is None else request.first_at
    seconds = {"queued": first - request.queued_at, "starting": until - first, "running": now - until}
    seconds |= finished.seconds if finished else {}
    return _line(
        request.message,
        request.metas,
        layout=_layout(request, models),
        seconds=seconds,
        age=now - request.queued_at,
        received=finished.received if finished else 0,
        sent=finished.sent if finished else 0,
        answers=finished.steps if finished else 0,
        outcome=outcome,
    )


def of_refused(message: RankRequest, metas: Sequence[TensorMeta], outcome: str) -> str:
    """Return the line of a request that was not queued."""
    layout = message.model.layout
    return _line(message, metas, layout=layout, seconds={}, age=0.0, received=0, sent=0, answers=0, outcome=outcome)


def _line(
    message: RankRequest,
    metas: Sequence[TensorMeta],
    *,
    layout: ParallelLayout | None,
    seconds: dict[str, float],
    age: float,
    received: int,
    sent: int,
    answers: int,
    outcome: str,
) -> str:
    kind, shapes = type(message).__name__, {meta.name: meta.shape for meta in metas}
    path = message.model.path
    return request_log.encode(
        request_log.RequestLine(
            time=(datetime.now().astimezone() - timedelta(seconds=age)).isoformat(timespec="milliseconds"),
            id=message.request_id[:_MAX_NAME],
            kind=kind,
            model="the copied model" if path.startswith(_IN_MEMORY) else Path(path).name[:_MAX_NAME],
            layout=str(layout or ""),
            size=shapes.get(_LATENTS.get(kind, ""), ()),
            steps=_steps(message, shapes, answers),
            seconds={phase: round(spent, 6) for phase, spent in seconds.items() if spent >= 5e-7},
            received=received,
            sent=sent,
            outcome=outcome,
        )
    )


def _steps(message: RankRequest, shapes: Mapping[str, tuple[int, ...]], answers: int) -> int:
    """Return the steps that a step loop was asked for, or that ComfyUI's had answered; 0 for other requests."""
    if isinstance(message, Sample):
        return max(0, (shapes.get(_STEPS) or (1,))[0] - 1)
    return answers if isinstance(message, Forward) else 0


def _layout(request: QueuedRequest, models: Sequence[LoadedModel]) -> ParallelLayout | None:
    """Return the layout in which a request ran, or would have run."""
    if request.layout is None or request.finished is None or request.finished.code != DONE:
        return request.layout
    return chosen_layout(request.message.model, models)
