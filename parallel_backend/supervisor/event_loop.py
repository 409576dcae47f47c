"""An event loop over file descriptors, with one callback for each.

It uses ``poll`` because ``selectors`` rejects an empty event mask: the supervisor must notice that a client disconnects
although only a rank may read the connection's bytes. ``epoll`` would still report a descriptor that has been closed
here but is open in the process that it was passed to; ``poll`` does not.
"""

import math
import select
from collections.abc import Callable

READ = select.POLLIN
DISCONNECT = 0
"""Report only errors and disconnections."""


class EventLoop:
    """Calls the callback of each watched descriptor that has an event."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, events: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` on any of ``events``, and always on an error or a disconnection."""
        self._poll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call this before closing it."""
        if self._callbacks.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def run_once(self, seconds: float) -> None:
        """Wait up to ``seconds`` for events, and call the callbacks of those that happened."""
        for descriptor, _ in self._poll.poll(math.ceil(seconds * 1000)):
            callback = self._callbacks.get(descriptor)
            if callback:
                callback()
