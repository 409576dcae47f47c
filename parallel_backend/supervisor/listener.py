"""The supervisor's front door: accepts connections, checks whose they are, and reads one header off each."""

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
    """Send a small message without waiting, to a client that may be gone or may not read."""
    try:
        sock.send(frames.pack(frames.Frame(message=message)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        log.info("a client did not take its answer: %s", error)


def refuse(sock: socket.socket, error: BackendError) -> None:
    """Answer with an error and close."""
    answer(sock, Error(code=error.code, message=str(error)))
    sock.close()


@dataclass(kw_only=True)
class _Caller:
    sock: socket.socket
    reader: frames.HeaderReader
    since: float


class Listener:
    """Hands whole headers to ``on_frame(sock, frame)``, which owns the connection from then on.

    At most ``limit`` connections may be without a header, each for at most ``patience`` seconds.
    ``uid_of`` says who is calling; any other user than this process's own is refused.
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
        self._listener, self._uid, self._events, self._on_frame = listener, uid, events, on_frame
        self._limit, self._patience, self._uid_of = limit, patience, uid_of
        self._callers: dict[int, _Caller] = {}
        listener.setblocking(False)
        events.watch(listener.fileno(), READ, self.accept)

    def accept(self) -> bool:
        """Take one waiting connection; whether there was one."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        sock.setblocking(True)
        uid = self._uid_of(sock)
        if uid != self._uid:
            log.warning("refused a connection of user %d", uid)
            sock.close()
        elif len(self._callers) >= self._limit:
            refuse(sock, QueueFull(f"more than {self._limit} connections wait to be read"))
        else:
            caller = _Caller(sock=sock, reader=frames.HeaderReader(sock), since=time.monotonic())
            self._callers[sock.fileno()] = caller
            self._events.watch(sock.fileno(), READ, lambda: self._read(caller))
        return True

    def _read(self, caller: _Caller) -> None:
        try:
            frame = caller.reader.advance()
        except ProtocolError as error:
            log.warning("refused a message: %s", error)
            refuse(self._release(caller), error)
        except OSError:
            self._release(caller).close()
        else:
            if frame is not None:
                self._on_frame(self._release(caller), frame)

    def _release(self, caller: _Caller) -> socket.socket:
        self._events.forget(caller.sock.fileno())
        del self._callers[caller.sock.fileno()]
        return caller.sock

    def tick(self) -> None:
        """Hang up on whoever takes too long over a header."""
        oldest = time.monotonic() - self._patience
        for caller in [caller for caller in self._callers.values() if caller.since < oldest]:
            self._release(caller).close()

    @property
    def pending(self) -> bool:
        """Whether somebody is connected who has not said yet what is wanted."""
        return bool(self._callers)

    def close(self) -> None:
        """Stop listening and hang up on whoever has said nothing yet."""
        self._events.forget(self._listener.fileno())
        self._listener.close()
        for caller in list(self._callers.values()):
            self._release(caller).close()
