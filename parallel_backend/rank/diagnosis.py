"""A rank's report of an error: whether it is out of memory, and whether another rank is the likely cause."""

from ..error_texts import Cause, cause
from ..errors import MAX_MESSAGE, BrokenPackage, OutOfMemory, RankFailed
from ..packages import broken_by
from ..protocol.rank_control import Finished


def diagnose(error: BaseException, request_id: str, *, when: str = "") -> Finished:
    """Return the report of an error that makes the set of ranks unusable.

    Args:
        error: what was raised.
        request_id: the request that it ended; "" outside of requests.
        when: the rank's work at that time, as in ``" while starting"``.
    """
    if broken := broken_by(error):
        message = f"failed{when}: {broken}"[:MAX_MESSAGE]
        return Finished(request_id=request_id, code=BrokenPackage.code, message=message)
    from ..distributed.device_memory import ran_out

    origin = error.__cause__ if isinstance(error, OutOfMemory) else error
    text = " ".join(str(origin).split())[:MAX_MESSAGE] or "no message"
    if isinstance(error, OutOfMemory) or ran_out(error):
        return Finished(request_id=request_id, code=OutOfMemory.code, message=f"ran out of memory{when}: {text}")
    message = f"failed{when}: {type(error).__name__}: {text}"
    return Finished(request_id=request_id, code=RankFailed.code, message=message, by_peer=_by_peer(error))


def _by_peer(error: BaseException) -> bool:
    """Whether another rank probably caused an error: a failed communication does not say whose fault it is."""
    from torch.distributed import DistError

    said = cause(str(error)) if isinstance(error, RuntimeError) else Cause.UNKNOWN
    return said is Cause.PEER or (said is Cause.UNKNOWN and isinstance(error, DistError))
