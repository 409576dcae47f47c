"""Waiting on a socket, and never without an end."""

import math
import select
import socket
import time
from collections.abc import Callable

from ..errors import DeadlineExceeded

READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class Deadline:
    """A moment after which a phase has failed.

    Raises:
        DeadlineExceeded: from ``remaining``, once it has passed; the message names the phase.
    """

    def __init__(self, seconds: float, phase: str) -> None:
        self.seconds, self.phase = seconds, phase
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self.phase} took longer than {self.seconds:g} s")
        return left

    def renew(self) -> None:
        """Start over: something was heard from the other side."""
        self._end = time.monotonic() + self.seconds


def wait_for(sock: socket.socket, events: int, seconds: float) -> bool:
    """Whether ``READABLE`` or ``WRITABLE`` came in time; for any descriptor, also above 1023."""
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
    """Send all bytes; the deadline starts over whenever the other side takes some.

    Raises:
        DeadlineExceeded: the other side does not take them.
        ConnectionError: the other side closed.
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
