"""Carries bytes between a TLS connection and a plain socket, as if the two ends of the plain one were one connection.

A client's thread and the gateway share it: ``step`` moves bytes without waiting, and ``interests`` says what to wait
for. It holds at most ``ROOM`` bytes in each direction; a faster sender waits, as on any socket.
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import TypeVar

ROOM = 256 << 10
"""Bytes that wait in one direction."""
TURN = 1 << 20
"""Bytes of one direction in one step, after which others have their turn."""
LOOK = 1.0
"""Seconds between two looks at whether a side has gone whose bytes are not read now, because the other takes none."""
FLUSH = 60.0
"""Seconds for which a client may take none of the bytes that are left for it once the supervisor has closed."""
LINGER = 5.0
"""The same for what a client has left when it closes, and seconds in which the other machine is to close its end: a
socket that is closed earlier may lose the last bytes sent to it."""

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
"""How soon a machine that has vanished is noticed; see tcp(7)."""

_RESET = struct.pack("ii", 1, 0)
"""For ``SO_LINGER``: closing resets the connection."""

Value = TypeVar("Value")


def set_options(sock: socket.socket) -> None:
    """Make a TCP connection send at once, and end if the other machine vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Relay:
    """Carries bytes until one side ends, then delivers the rest to the other side.

    Args:
        tls: the connection to the other machine.
        plain: a socket of this machine.
        serves: whether the other machine is a client. If so, the relay ends at once when the client does, so that its
            request is cancelled. Otherwise all that it sent is delivered first.
    """

    def __init__(self, tls: ssl.SSLSocket, plain: socket.socket, *, serves: bool) -> None:
        tls.setblocking(False)
        plain.setblocking(False)
        self._tls, self._plain, self._serves = _End(tls), _End(plain), serves
        self._incoming, self._outgoing = _Way(self._tls, self._plain), _Way(self._plain, self._tls)
        self._lingering: socket.socket | None = None
        self._end_by: float | None = None
        self._moved = 0

    def step(self) -> bool:
        """Move bytes without waiting. Return whether there is more to do."""
        if self._lingering is not None:
            return self._linger(self._lingering)
        self._incoming.step()
        self._outgoing.step()
        if self._client_has_gone():
            return False
        if self._incoming.ended and not self._incoming.waiting:
            return False
        if self._outgoing.ended and not self._outgoing.waiting:
            self._shut_down()
        return self._in_time()

    def interests(self) -> dict[int, int]:
        """Return events to wait for, by descriptor."""
        if self._lingering is not None:
            return {self._lingering.fileno(): select.POLLIN}
        found: dict[int, int] = {}
        for end, events in (*self._incoming.interests(), *self._outgoing.interests()):
            found[end.sock.fileno()] = found.get(end.sock.fileno(), 0) | events
        return found

    @property
    def timeout(self) -> float | None:
        """Seconds after which to step even without an event; None for never."""
        if self._lingering is None and (self._incoming.unfinished or self._outgoing.unfinished):
            return 0.0
        waiting = self._incoming.waiting or self._outgoing.waiting
        return LOOK if waiting or self._end_by is not None else None

    def close(self) -> None:
        """Close both sockets."""
        for sock in (self._tls.sock, self._plain.sock, self._lingering):
            if sock is not None:
                sock.close()

    def run(self) -> None:
        """Carry bytes until the end, in a thread of its own, and close both sockets."""
        try:
            while self.step():
                poller = select.poll()
                for descriptor, events in self.interests().items():
                    poller.register(descriptor, events)
                poller.poll(None if self.timeout is None else self.timeout * 1000)
        finally:
            self.close()

    def _client_has_gone(self) -> bool:
        ended = self._incoming.ended or self._outgoing.broken
        return self._serves and (ended or (self._incoming.waiting > 0 and hung_up(self._tls.sock)))

    def _in_time(self) -> bool:
        """Whether to keep waiting until the other machine takes the rest."""
        leaving = self._outgoing.ended or (self._outgoing.waiting > 0 and hung_up(self._plain.sock))
        if not leaving:
            return True
        if self._end_by is None or self._outgoing.moved != self._moved:
            patience = FLUSH if self._serves else LINGER
            self._end_by, self._moved = time.monotonic() + patience, self._outgoing.moved
        if time.monotonic() < self._end_by:
            return True
        _reset(self._tls.sock)
        return False

    def _shut_down(self) -> None:
        """Tell the other machine that all has been sent, and wait for its end."""
        tls = self._tls.sock
        assert isinstance(tls, ssl.SSLSocket)
        try:
            tls.unwrap()
        except ssl.SSLWantWriteError:
            return  # the next step tries again
        except (OSError, ValueError):  # the end is sent, and needs no answer; or the peer is gone
            pass
        self._plain.sock.close()
        self._lingering = socket.socket(fileno=tls.detach())
        self._lingering.setblocking(False)
        with contextlib.suppress(OSError):
            self._lingering.shutdown(socket.SHUT_WR)
        self._end_by = time.monotonic() + LINGER

    def _linger(self, sock: socket.socket) -> bool:
        try:
            while sock.recv(ROOM):
                pass
        except BlockingIOError:
            if self._end_by is None or time.monotonic() < self._end_by:
                return True
            if not self._serves:
                _reset(sock)
        except OSError:
            pass
        return False


def _reset(sock: socket.socket) -> None:
    """Make the kernel drop unsent bytes when a connection is closed.

    Otherwise it would go on sending, and a gateway whose supervisor reads nothing would see no end until all arrived.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class _End:
    """One of the two sockets, non-blocking; it waits for ``read_events`` and ``write_events``."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.read_events, self.write_events = select.POLLIN, select.POLLOUT

    def read(self, room: memoryview) -> int | None:
        """Return the number of bytes read, 0 at the end, and None if nothing has arrived yet."""
        count, self.read_events = _tried(lambda: self.sock.recv_into(room), select.POLLIN)
        return count

    def write(self, data: memoryview) -> int | None:
        """Return the number of bytes taken, or None without room. An ``OSError`` means that the peer is gone."""
        count, self.write_events = _tried(lambda: self.sock.send(data), select.POLLOUT)
        return count


def _tried(call: Callable[[], Value], events: int) -> tuple[Value | None, int]:
    """Return the result of a call, or None and the event to wait for. In TLS this may be the other direction."""
    try:
        return call(), events
    except ssl.SSLWantReadError:
        return None, select.POLLIN
    except ssl.SSLWantWriteError:
        return None, select.POLLOUT
    except BlockingIOError:
        return None, events


class _Way:
    """One direction.

    Attributes:
        ended: whether the source has ended.
        broken: whether the sink takes no more; bytes from the source are then dropped.
        moved: bytes taken by the sink.
        unfinished: whether the last step stopped with more to move.
    """

    def __init__(self, source: _End, sink: _End) -> None:
        self._source, self._sink = source, sink
        self._room, self._begin, self._end = memoryview(bytearray(ROOM)), 0, 0
        self.ended = self.broken = self.unfinished = False
        self.moved = 0

    @property
    def waiting(self) -> int:
        """Bytes that the sink has not taken yet."""
        return self._end - self._begin

    def step(self) -> None:
        """Move up to ``TURN`` bytes."""
        start = self.moved
        while self.moved - start < TURN:
            if not self.waiting and not self._fill():
                break
            if not self._empty():
                break
        self.unfinished = self.moved - start >= TURN

    def _fill(self) -> bool:
        """Read available bytes. Return whether anything waits to be written."""
        self._begin = self._end = 0
        while not self.ended and self._end < ROOM:
            try:
                count = self._source.read(self._room[self._end :])
            except OSError:  # the peer has reset the connection
                count = 0
            if count is None:
                break
            self.ended = count == 0
            self._end += count
        return self._end > 0

    def _empty(self) -> bool:
        """Write waiting bytes. Return whether all are written."""
        while self.waiting:
            count = self.waiting if self.broken else self._write()
            if count is None:
                return False
            self._begin += count
            self.moved += count
        return True

    def _write(self) -> int | None:
        try:
            return self._sink.write(self._room[self._begin : self._end])
        except OSError:
            self.broken = True
            return self.waiting

    def interests(self) -> list[tuple[_End, int]]:
        """Return what to wait for, by end."""
        if self.waiting:
            return [(self._sink, self._sink.write_events)]
        return [] if self.ended else [(self._source, self._source.read_events)]


def hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed its end, even if bytes from it have not been read."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
