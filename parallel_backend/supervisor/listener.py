"""The supervisor's listening socket: accepts connections, checks their users, and reads one header from each."""

import errno
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import BackendError, BackendFailure, DeadlineExceeded, ProtocolError, QueueFull, shortened
from ..protocol import frames
from ..protocol.endpoint import peer
from ..protocol.messages import Error
from .event_loop import READ, EventLoop

log = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) that pass once something is freed."""


def answer(sock: socket.socket, message: object) -> None:
    """Send a small message without blocking, to a client that may be gone or may not read."""
    if isinstance(message, Error):
        message = replace(message, message=shortened(message.message))
    try:
        sock.send(frames.pack(frames.Frame(message=message)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        log.info("a client did not read its answer: %s", error)


def refuse(sock: socket.socket, error: BackendError) -> None:
    """Answer with an error and close the connection."""
    answer(sock, Error(code=error.code, message=str(error)))
    sock.close()


@dataclass(kw_only=True)
class _Pending:
    """A connection whose header has not fully arrived; ``since`` is when it was accepted."""

    sock: socket.socket
    reader: frames.HeaderReader
    since: float


class Listener:
    """Accepts connections and reads a header from each.

    A client sends its header at once, so the oldest waiting connection is the least likely to send one. It makes room
    if too many wait, or if the process has no descriptor left. A busy client sends its header a moment later, so if too
    many wait, no connection makes room before its grace is over. New ones are not accepted until then.

    Args:
        listener: the listening socket.
        uid: the user whose connections are accepted; all others are refused.
        events: the supervisor's event loop.
        on_frame: called with a connection, which it then owns, and the frame of its header.
        limit: most connections that may wait for their header at a time.
        patience: seconds that each of them may wait.
        grace: seconds that each of them may wait even if too many do.
        pause: seconds without accepting if no descriptor is left and no connection can make room.
        uid_of: returns the user id of a connection's peer.
    """

    def __init__(
        self,
        *,
        listener: socket.socket,
        uid: int,
        events: EventLoop,
        on_frame: Callable[[socket.socket, frames.Frame], None],
        limit: int = 64,
        patience: float = 10.0,
        grace: float = 0.1,
        pause: float = 0.5,
        uid_of: Callable[[socket.socket], int] = lambda sock: peer(sock)[1],
    ) -> None:
        self._socket, self._uid, self._events, self._on_frame = listener, uid, events, on_frame
        self._limit, self._patience, self._grace = limit, patience, grace
        self._pause, self._uid_of = pause, uid_of
        self._pending: dict[int, _Pending] = {}  # by descriptor, the oldest first
        self._paused_until: float | None = None
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._paused_until = None
        self._events.watch(self._socket.fileno(), READ, self.accept, discard=lambda error: self._rest())

    def _rest(self, seconds: float | None = None) -> None:
        """Accept nothing for a while: otherwise the socket stays readable, and the loop does nothing else."""
        self._events.forget(self._socket.fileno())
        self._paused_until = time.monotonic() + (self._pause if seconds is None else seconds)

    def _grace_left(self) -> float:
        """Return for how many seconds no connection can make room for another."""
        if len(self._pending) < self._limit:
            return 0.0
        return next(iter(self._pending.values())).since + self._grace - time.monotonic()

    def accept(self) -> bool:
        """Accept one pending connection. Return whether there was one."""
        if (grace := self._grace_left()) > 0:
            self._rest(grace)
            return False
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._free_descriptor(error)
            return True
        sock.setblocking(True)
        uid = self._uid_of(sock)
        if uid != self._uid:
            log.warning("refused a connection from user %d", uid)
            sock.close()
        else:
            self._await_header(sock)
        return True

    def _free_descriptor(self, error: OSError) -> None:
        """Make room for a connection that waits to be accepted, or let it wait."""
        log.warning("a connection is not accepted: %s", error)
        if self._pending:
            self._refuse_oldest("the backend has no file descriptor left for more connections")
        else:
            self._rest()

    def _await_header(self, sock: socket.socket) -> None:
        if len(self._pending) >= self._limit:
            self._refuse_oldest(f"more than {self._limit} connections are waiting to be read")
        pending = _Pending(sock=sock, reader=frames.HeaderReader(sock), since=time.monotonic())
        self._pending[sock.fileno()] = pending
        self._events.watch(
            sock.fileno(), READ, lambda: self._read(pending), discard=lambda error: self._discard(pending, error)
        )

    def _refuse_oldest(self, reason: str) -> None:
        refuse(self._release(next(iter(self._pending.values()))), QueueFull(reason))

    def _read(self, pending: _Pending) -> None:
        try:
            frame = pending.reader.advance()
        except ProtocolError as error:
            log.warning("refused a message: %s", shortened(str(error)))
            refuse(self._release(pending), error)
        except OSError:
            self._release(pending).close()
        else:
            if frame is not None:
                self._on_frame(self._release(pending), frame)

    def _discard(self, pending: _Pending, error: Exception) -> None:
        """Close a connection whose message caused an exception that should not have happened."""
        self._pending.pop(pending.sock.fileno(), None)
        text = f"the backend failed on this message: {type(error).__name__}: {error}; backend.log has the trace"
        refuse(pending.sock, BackendFailure(text))

    def _release(self, pending: _Pending) -> socket.socket:
        self._events.forget(pending.sock.fileno())
        del self._pending[pending.sock.fileno()]
        return pending.sock

    def tick(self) -> None:
        """Refuse connections that take too long to send their header, and accept new ones again after a pause."""
        now = time.monotonic()
        for pending in [pending for pending in self._pending.values() if now - pending.since > self._patience]:
            late = DeadlineExceeded(f"the message did not arrive within {self._patience:g} s")
            refuse(self._release(pending), late)
        if self._paused_until is not None and now > self._paused_until:
            self._listen()

    @property
    def pending(self) -> bool:
        """Whether a connection has not sent its whole header yet."""
        return bool(self._pending)

    def close(self) -> None:
        """Stop listening, and close connections without a whole header."""
        self._events.forget(self._socket.fileno())
        self._socket.close()
        for pending in list(self._pending.values()):
            self._release(pending).close()
