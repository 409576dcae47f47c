"""Waits on sockets, each with a deadline."""

import math
import select
import socket
import time
from collections.abc import Callable

from ..errors import DeadlineExceeded

READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class Deadline:
    """The time limit of a phase: ``seconds`` from its creation, or from the last ``renew``."""

    def __init__(self, seconds: float, phase: str) -> None:
        self.seconds, self.phase = seconds, phase
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineExceeded: no time is left; the message names the phase.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self.phase} took longer than {self.seconds:g} s")
        return left

    def renew(self) -> None:
        """Start over, because the peer made progress."""
        self._end = time.monotonic() + self.seconds


def wait_for(sock: socket.socket, events: int, seconds: float) -> bool:
    """Wait for ``READABLE`` or ``WRITABLE``; return whether it came in time. Descriptors above 1023 work, too."""
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(math.ceil(seconds * 1000)))


def send_all(
    sock: socket.socket,
    data: bytes | memoryview,
    *,
    deadline: Deadline,
    poll: Callable[[], None] | None = None,
    poll_every: float = 0.05,
) -> None:
    """Send all bytes, and renew the deadline whenever the peer accepts some.

    If ``poll`` is given, it is called after each chunk, and every ``poll_every`` seconds while the peer accepts none.

    Raises:
        DeadlineExceeded: the peer accepts no more bytes.
        ConnectionError: the peer closed the connection.
    """
    view = memoryview(data).cast("B")
    while view:
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            deadline.renew()
        except BlockingIOError:
            wait_for(sock, WRITABLE, min(deadline.remaining(), poll_every) if poll else deadline.remaining())
        if poll:
            poll()
