"""Frees a model's weights on the ranks soon after its last holder is gone.

The collector may run a finalizer between any two lines of any thread, also inside Python's own locks. So a finalizer
takes no lock and starts no thread. A thread of its own does the rest, and ends when nothing is held.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from ...parallel_backend.protocol.model_spec import ModelSpec

FREE_DELAY = 5.0
"""Seconds until the weights of a dropped model are freed; a loader that runs again may reuse them."""

THREAD = "parallel-dit-free"
"""The name of the thread that frees."""

_Key = tuple[str, str, str]


class HeldModels:
    """Which objects hold which models.

    Args:
        free: makes the ranks free a model. Returns false to be called again later.
        delay: see ``FREE_DELAY``.
    """

    def __init__(self, free: Callable[[ModelSpec], bool], delay: float = FREE_DELAY) -> None:
        self._free, self._delay = free, delay
        self._released: SimpleQueue[tuple[ModelSpec, object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._holders: dict[_Key, set[object]] = {}
        self._dropped: dict[_Key, ModelSpec] = {}
        self._thread: threading.Thread | None = None

    def hold(self, spec: ModelSpec, holder: object) -> None:
        """Keep a model until ``release`` is called with the same arguments."""
        with self._lock:
            self._holders.setdefault(_key(spec), set()).add(holder)
            self._start()

    def release(self, spec: ModelSpec, holder: object) -> None:
        """Record that a holder is gone. Safe in a finalizer: a ``SimpleQueue`` takes no lock of Python's."""
        self._released.put((spec, holder))

    def free_dropped(self) -> None:
        """Free the models without a holder. Try again later if that is not possible yet."""
        with suppress(Empty):
            while True:
                self._note(*self._released.get_nowait())
        for key in list(self._dropped):
            with self._lock:
                spec = self._dropped.pop(key, None)
                unused = spec is not None and key not in self._holders
            if spec is not None and unused and not self._free(spec):
                with self._lock:
                    self._dropped.setdefault(key, spec)
                    self._start()

    def _note(self, spec: ModelSpec, holder: object) -> None:
        key = _key(spec)
        with self._lock:
            holders = self._holders.get(key, set())
            holders.discard(holder)
            if not holders:
                self._holders.pop(key, None)
                self._dropped[key] = spec

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._needed():
            with suppress(Empty):
                self._note(*self._released.get(timeout=self._delay))
                time.sleep(self._delay)
            try:
                self.free_dropped()
            except Exception:
                logging.exception("Parallel DiT: the ranks could not free memory")

    def _needed(self) -> bool:
        with self._lock:
            if self._holders or self._dropped:
                return True
            self._thread = None
            return False


def _key(spec: ModelSpec) -> _Key:
    return spec.path, spec.stamp, spec.dtype
