"""The supervisor's listening socket: accepts connections, checks their users, and reads one header from each."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import BackendError, ProtocolError, QueueFull
from ..protocol import frames
from ..protocol.endpoint import peer
from ..protocol.messages import Error
from .event_loop import READ, EventLoop

log = logging.getLogger(__name__)


def answer(sock: socket.socket, message: object) -> None:
    """Send a small message without blocking, to a client that may be gone or may not read."""
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

    Args:
        listener: the listening socket.
        uid: the user whose connections are accepted; all others are refused.
        events: the supervisor's event loop.
        on_frame: called with a connection, which it then owns, and the frame of its header.
        limit: how many connections may wait for their header at a time.
        patience: how many seconds each of them may wait.
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
        uid_of: Callable[[socket.socket], int] = lambda sock: peer(sock)[1],
    ) -> None:
        self._socket, self._uid, self._events, self._on_frame = listener, uid, events, on_frame
        self._limit, self._patience, self._uid_of = limit, patience, uid_of
        self._pending: dict[int, _Pending] = {}
        listener.setblocking(False)
        events.watch(listener.fileno(), READ, self.accept)

    def accept(self) -> bool:
        """Accept one pending connection. Return whether there was one."""
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        sock.setblocking(True)
        uid = self._uid_of(sock)
        if uid != self._uid:
            log.warning("refused a connection from user %d", uid)
            sock.close()
        elif len(self._pending) >= self._limit:
            refuse(sock, QueueFull(f"more than {self._limit} connections are waiting to be read"))
        else:
            self._await_header(sock)
        return True

    def _await_header(self, sock: socket.socket) -> None:
        pending = _Pending(sock=sock, reader=frames.HeaderReader(sock), since=time.monotonic())
        self._pending[sock.fileno()] = pending
        self._events.watch(sock.fileno(), READ, lambda: self._read(pending))

    def _read(self, pending: _Pending) -> None:
        try:
            frame = pending.reader.advance()
        except ProtocolError as error:
            log.warning("refused a message: %s", error)
            refuse(self._release(pending), error)
        except OSError:
            self._release(pending).close()
        else:
            if frame is not None:
                self._on_frame(self._release(pending), frame)

    def _release(self, pending: _Pending) -> socket.socket:
        self._events.forget(pending.sock.fileno())
        del self._pending[pending.sock.fileno()]
        return pending.sock

    def tick(self) -> None:
        """Close connections that take too long to send their header."""
        oldest = time.monotonic() - self._patience
        for pending in [pending for pending in self._pending.values() if pending.since < oldest]:
            self._release(pending).close()

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
