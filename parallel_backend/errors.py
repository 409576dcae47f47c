"""The errors that cross the socket.

BackendError
├── InvalidRequest        the request cannot work; nothing was changed
├── Cancelled             the request was cancelled before it finished
└── BackendFailure
    ├── BackendUnavailable    no supervisor answers and none could be started
    ├── ProtocolError         the peer speaks another protocol version, or its bytes do not decode
    ├── QueueFull             the queue has no room
    ├── DeadlineExceeded      a phase missed its deadline; the message names the phase
    ├── ClientStalled         the client neither sent nor read anything for too long; the ranks stay usable
    ├── RankFailed            a rank died, hung or raised; the message names the rank
    ├── BrokenPackage         a Python package is missing or cannot be imported; the message says what mends it
    └── OutOfMemory           a rank ran out of device memory; the message names the rank
        └── NoRoom                a rank would run out of memory; all ranks keep their weights
"""

from typing import ClassVar


class BackendError(Exception):
    """Base class of all errors of the backend. The message is one sentence for the user."""

    code: ClassVar[str] = "error"


class InvalidRequest(BackendError, ValueError):
    """The request cannot work. The message names the value and what would work.

    Every rank raises it for the same request, so the ranks stay usable.
    """

    code = "invalid_request"


class Cancelled(BackendError):
    """The request was cancelled before it finished."""

    code = "cancelled"


class BackendFailure(BackendError):
    """The backend failed; the base class of more specific failures."""

    code = "failure"


class BackendUnavailable(BackendFailure):
    """No backend answers, and none could be started."""

    code = "unavailable"


class ProtocolError(BackendFailure):
    """The peer speaks another protocol version, or its bytes do not decode."""

    code = "protocol"


class QueueFull(BackendFailure):
    """The bounded queue is full."""

    code = "queue_full"


class DeadlineExceeded(BackendFailure):
    """A phase missed its deadline; the message names the phase."""

    code = "deadline"


class ClientStalled(BackendFailure):
    """The client neither sent nor read anything for too long, as a stopped process does. The ranks stay usable."""

    code = "client_stalled"


class RankFailed(BackendFailure):
    """A rank died, hung or raised; the whole set of ranks was killed.

    Attributes:
        not_started: the ranks that failed before they were ready; empty if the set had started.
    """

    code = "rank_failed"
    not_started: tuple[int, ...] = ()


class BrokenPackage(BackendFailure):
    """A Python package that is needed is missing or cannot be imported. The ranks end, since it may soon be mended.

    Attributes:
        package: the name by which it is imported; "" in an error that has crossed the socket.
    """

    code = "broken_package"

    def __init__(self, message: str, *, package: str = "") -> None:
        super().__init__(message)
        self.package = package


class OutOfMemory(BackendFailure):
    """A rank ran out of device memory; the whole set of ranks was killed."""

    code = "out_of_memory"


class NoRoom(OutOfMemory):
    """A request needs more device memory than a rank has.

    Every rank raises it for the same request, or there is one rank only, so the ranks stay usable.
    """

    code = "no_room"


_CLASSES: tuple[type[BackendError], ...] = (
    InvalidRequest,
    Cancelled,
    BackendUnavailable,
    ProtocolError,
    QueueFull,
    DeadlineExceeded,
    ClientStalled,
    RankFailed,
    BrokenPackage,
    OutOfMemory,
    NoRoom,
    BackendFailure,
)
BY_CODE: dict[str, type[BackendError]] = {cls.code: cls for cls in _CLASSES}


MAX_MESSAGE = 4000
"""Characters of a message that cross a socket; where it was written to a log, that has them all."""


def shortened(message: str) -> str:
    """Return a message of at most ``MAX_MESSAGE`` characters: a longer message loses its middle."""
    if len(message) <= MAX_MESSAGE:
        return message
    kept = (MAX_MESSAGE - 5) // 2
    return f"{message[:kept]} ... {message[-kept:]}"


def from_code(code: str, message: str) -> BackendError:
    """The error for a code from the wire; an unknown code becomes a ``BackendFailure``."""
    return BY_CODE.get(code, BackendFailure)(message)
