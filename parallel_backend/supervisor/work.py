"""What the ranks work on, for the status."""

import time

from ..protocol.messages import RankRequest
from ..protocol.status import Work
from .request_queue import QueuedRequest


def work_of(request: QueuedRequest) -> Work:
    """Describe a running request."""
    message: RankRequest = request.message
    return Work(
        kind=type(message).__name__,
        origin=message.origin,
        model=message.model.path,
        automatic=message.model.layout is None,
        seconds=time.monotonic() - (request.ran_at or request.queued_at),
    )
