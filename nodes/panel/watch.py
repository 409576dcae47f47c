"""Pushes what the panel shows to the pages that have it open, over ComfyUI's own websocket.

A page renews its wish while its panel is open. Without one, no thread runs and nobody asks the backend.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from .snapshot import Json, snapshot, without_clocks

EVENT = "parallel_dit.status"
"""The name of the pushed message."""
LEASE = 30.0
"""Seconds that a wish lasts. A page renews it three times in that time."""
BUSY, IDLE = 1.0, 3.0
"""Seconds between two looks. Ranks report once a second."""
THREAD = "parallel-dit-panel"

Send = Callable[[str, Json, str], Any]
"""Sends an event with its data to a page."""


class Watchers:
    """The pages that watch.

    Args:
        send: see ``Send``.
        look: returns what is shown.
        clock: returns seconds.
    """

    def __init__(
        self, send: Send, look: Callable[[], Json] = snapshot, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._look, self._clock = send, look, clock
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._until: dict[str, float] = {}
        self._known: dict[str, Json] = {}
        self._thread: threading.Thread | None = None

    def watch(self, page: str) -> None:
        """Push to a page for ``LEASE`` seconds. A new one gets the first snapshot at once."""
        with self._lock:
            if page not in self._until:
                self._wake.set()
            self._until[page] = self._clock() + LEASE
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
                self._thread.start()

    def leave(self, page: str) -> None:
        """Push nothing more to a page."""
        with self._lock:
            self._forget(page)
        self._wake.set()

    def hurry(self) -> None:
        """Look again now, because something was changed."""
        self._wake.set()

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages that watch."""
        with self._lock:
            return tuple(self._until)

    def _forget(self, page: str) -> None:
        self._until.pop(page, None)
        self._known.pop(page, None)

    def _run(self) -> None:
        while self._wanted():
            try:
                pause = self._push(self._look())
            except Exception:
                logging.exception("Parallel DiT: the panel cannot be told what happens")
                pause = IDLE
            self._wake.wait(pause)
            self._wake.clear()

    def _push(self, shown: Json) -> float:
        """Send a snapshot to the pages that do not know it, and return the seconds until the next one."""
        still = without_clocks(shown)
        for page in self.pages:
            if self._known.get(page) != still:
                self._send(EVENT, shown, page)
                with self._lock:
                    if page in self._until:
                        self._known[page] = still
        return BUSY if shown["busy"] else IDLE

    def _wanted(self) -> bool:
        with self._lock:
            for page in [page for page, until in self._until.items() if until < self._clock()]:
                self._forget(page)
            if self._until:
                return True
            self._thread = None
            return False
