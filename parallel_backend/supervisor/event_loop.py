"""An event loop over file descriptors, with one callback for each.

It uses ``poll`` because ``selectors`` rejects an empty event mask: the supervisor must notice that a client disconnects
although only a rank may read the connection's bytes. ``epoll`` would still report a descriptor that has been closed
here but is open in the process that it was passed to; ``poll`` does not.
"""

import logging
import math
import select
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

READ, WRITE = select.POLLIN, select.POLLOUT
DISCONNECT = 0
"""Report only errors and disconnections."""

Callback = Callable[[], object]
Discard = Callable[[Exception], object]


@dataclass(frozen=True, kw_only=True)
class _Watched:
    callback: Callback
    discard: Discard


class EventLoop:
    """Calls the callback of each watched descriptor that has an event.

    One descriptor cannot end the loop for the others: an exception of its callback is logged and counted, and the
    descriptor is discarded.

    Attributes:
        internal_errors: number of such exceptions.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, _Watched] = {}
        self.internal_errors = 0

    def watch(self, descriptor: int, events: int, callback: Callback, *, discard: Discard) -> None:
        """Call ``callback`` on any of ``events``, and on every error or disconnection.

        ``discard`` gets an exception of the callback, after the descriptor is no longer watched. It closes the
        descriptor's owner.
        """
        self._poll.register(descriptor, events)
        self._watched[descriptor] = _Watched(callback=callback, discard=discard)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call this before closing it."""
        if self._watched.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def run_once(self, seconds: float) -> None:
        """Wait up to ``seconds`` for events, and call their callbacks."""
        ready = self._poll.poll(math.ceil(seconds * 1000))
        # A callback may close a descriptor and watch a new one with its number, which has had no event.
        for descriptor, watched in [(descriptor, self._watched[descriptor]) for descriptor, _ in ready]:
            if self._watched.get(descriptor) is watched:
                self._call(descriptor, watched)

    def _call(self, descriptor: int, watched: _Watched) -> None:
        try:
            watched.callback()
        except Exception as error:
            self.count(error)
            self.forget(descriptor)
            try:
                watched.discard(error)
            except Exception as another:
                self.count(another)

    def count(self, error: Exception) -> None:
        """Log the trace of an exception that should not have happened, and count it."""
        self.internal_errors += 1
        log.error("an error that should not have happened", exc_info=error)
