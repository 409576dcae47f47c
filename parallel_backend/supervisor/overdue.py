"""Whether a running request should have ended, although no rank has failed."""

import time

from ..errors import Cancelled
from .limits import Limits
from .ranks.failures import Failure
from .request_queue import QueuedRequest


def overdue(request: QueuedRequest, limits: Limits, *, stuck: bool) -> Failure | None:
    """Return the failure of ranks that do not end a request: a cancelled one, or one that another rank has refused.

    Args:
        request: the running request.
        limits: how long they may take.
        stuck: whether they make no progress, which ends the wait for rank 0.
    """
    now = time.monotonic()
    if request.cancelled_at and now - request.cancelled_at > limits.cancel:
        message = f"the ranks did not end a cancelled request within {limits.cancel:g} s"
        return Failure(code=Cancelled.code, message=message)
    failure = request.early_failure
    if failure and (stuck or now - failure.at > limits.agree):
        return Failure(message=f"rank {failure.rank} alone ended the request: {failure.finished.message}")
    return None
