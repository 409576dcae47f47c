"""Every error that crosses the socket, by name.

BackendError
├── InvalidRequest        the caller asked for something that cannot work; nothing was changed
├── Cancelled             the caller took the request back
└── BackendFailure
    ├── BackendUnavailable    no supervisor answers and none could be started
    ├── ProtocolError         the other side speaks another version, or broke the framing
    ├── QueueFull             too many requests wait already
    ├── DeadlineExceeded      a phase took longer than its deadline; names the phase
    ├── RankFailed            a rank died, hung or raised; names the rank
    └── OutOfMemory           a rank ran out of device memory; names the rank
"""

from typing import ClassVar


class BackendError(Exception):
    """Base of all errors of the backend. The message is one sentence for the user."""

    code: ClassVar[str] = "error"


class InvalidRequest(BackendError, ValueError):
    """Names the value and what would work. Every rank raises it alike, so the ranks stay usable."""

    code = "invalid_request"


class Cancelled(BackendError):
    """The request was cancelled before it finished."""

    code = "cancelled"


class BackendFailure(BackendError):
    """Something on the backend's side went wrong."""

    code = "failure"


class BackendUnavailable(BackendFailure):
    """There is no backend to talk to."""

    code = "unavailable"


class ProtocolError(BackendFailure):
    """The bytes on the wire are not what this version speaks."""

    code = "protocol"


class QueueFull(BackendFailure):
    """The queue is bounded, and it is full."""

    code = "queue_full"


class DeadlineExceeded(BackendFailure):
    """A wait ended at its deadline."""

    code = "deadline"


class RankFailed(BackendFailure):
    """A rank died, hung or raised; the whole set of ranks was ended."""

    code = "rank_failed"


class OutOfMemory(BackendFailure):
    """A rank ran out of device memory; the whole set of ranks was ended."""

    code = "out_of_memory"


_CLASSES: tuple[type[BackendError], ...] = (
    InvalidRequest,
    Cancelled,
    BackendUnavailable,
    ProtocolError,
    QueueFull,
    DeadlineExceeded,
    RankFailed,
    OutOfMemory,
    BackendFailure,
)
BY_CODE: dict[str, type[BackendError]] = {cls.code: cls for cls in _CLASSES}


def from_code(code: str, message: str) -> BackendError:
    """The typed error for a code that came over the wire; an unknown code is a plain failure."""
    return BY_CODE.get(code, BackendFailure)(message)
