"""Why a set of ranks must be killed: all failures of its ranks, and their root cause."""

import logging
import signal
import time
from dataclasses import dataclass

from ...error_texts import Cause, cause
from ...errors import OutOfMemory, RankFailed
from ..limits import Patience

log = logging.getLogger(__name__)

DIED, HUNG, OUT_OF_MEMORY, RAISED, STUCK, BY_PEER, CLOSED = range(7)
"""Kinds of failure, the likeliest root cause first: when a rank dies, the others soon raise because it is missing."""

_BY_CAUSE = {Cause.FULL: (OUT_OF_MEMORY, OutOfMemory.code), Cause.PEER: (BY_PEER, RankFailed.code)}
"""Kind and code of the failure of a process whose log says why it ended itself: NCCL's watchdog ends the processes of
all ranks that wait for one."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a set must be killed.

    Attributes:
        kind: one of the constants above.
        code: one of ``errors``.
        not_started: see ``RankFailed``.
    """

    message: str
    kind: int = RAISED
    code: str = RankFailed.code
    not_started: tuple[int, ...] = ()


class Failures:
    """The failures of one set's ranks, in the order of their discovery."""

    def __init__(self, *, generation: int, patience: Patience) -> None:
        self._generation, self._patience = generation, patience
        self._noticed: list[tuple[float, Failure]] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._noticed)

    def add(self, failure: Failure) -> None:
        """Record a failure, and log it."""
        log.error("generation %d: %s", self._generation, failure.message)
        self._noticed.append((time.monotonic(), failure))

    def likeliest(self) -> Failure | None:
        """The likeliest root cause, once there is a failure and the ranks have had time to report others."""
        if not self:
            return None
        waited = time.monotonic() - self._noticed[0][0]
        likeliest = min((failure for _, failure in self._noticed), key=lambda failure: failure.kind)
        waits = {DIED: 0.0, BY_PEER: self._patience.blame, CLOSED: self._patience.blame}
        return likeliest if waited >= waits.get(likeliest.kind, self._patience.evidence) else None


def kind_of_exit(returncode: int, reason: str) -> tuple[int, str]:
    """Return the kind and code of an exited process's failure, by the reason in its last output."""
    explained = returncode > 0 or returncode == -signal.SIGABRT
    return _BY_CAUSE.get(cause(reason) if explained else Cause.UNKNOWN, (DIED, RankFailed.code))
