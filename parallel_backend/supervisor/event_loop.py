"""A loop over file descriptors with one callback each.

``poll`` rather than ``selectors``, which refuses an empty event mask: a hang-up must be noticed on a
connection whose bytes are somebody else's to read. It also forgets a descriptor that was passed on
as soon as it is closed here, which ``epoll`` does not.
"""

import math
import select
from collections.abc import Callable

READ = select.POLLIN
HANG_UP = 0
"""Report nothing but errors and hang-ups."""


class EventLoop:
    """Calls what was registered for each descriptor that has something to report."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, events: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` on ``events``, and always on an error or a hang-up."""
        self._poll.register(descriptor, events)
        self._callbacks[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        """Stop watching; to be called before the descriptor is closed."""
        if self._callbacks.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def run_once(self, seconds: float) -> None:
        """Wait at most that long, then call back for everything that happened."""
        for descriptor, _ in self._poll.poll(math.ceil(seconds * 1000)):
            callback = self._callbacks.get(descriptor)
            if callback:
                callback()
