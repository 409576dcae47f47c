"""The connection on which the steps of the newest run go: a step is one round trip to rank 0."""

import contextlib
import socket
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..protocol import deadlines
from .exchange import Exchange, Interrupted, OnProgress

END_TIMEOUT = 2.0
"""Seconds that the ranks have to be free after the end of a run; the next request waits in the queue otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Open:
    key: Hashable
    exchange: Exchange
    connection: socket.socket


class OpenRun:
    """At most one run whose connection rank 0 has left open. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run: _Open | None = None

    def keep(self, key: Hashable, exchange: Exchange, connection: socket.socket) -> None:
        """Keep the connection of a run if the ranks wait for its next step; otherwise close it."""
        if not exchange.open:
            connection.close()
            return
        with self._lock:
            before, self._run = self._run, _Open(key=key, exchange=exchange, connection=connection)
        _end(before)

    def step(
        self, key: Hashable, tensors: Mapping[str, Tensor], *, interrupted: Interrupted, on_progress: OnProgress
    ) -> dict[str, Tensor] | None:
        """Return the reply to a step of the run with this key; None if there is no such run. Any other run ends.

        Raises:
            RunEnded, BackendError: see ``Exchange.step``.
        """
        with self._lock:
            run, self._run = self._run, None
        if run is None or run.key != key or key is None:
            _end(run)
            return None
        try:
            reply = run.exchange.step(run.connection, tensors, interrupted=interrupted, on_progress=on_progress)
        except BaseException:
            run.connection.close()
            raise
        self.keep(key, run.exchange, run.connection)
        return reply

    def end(self) -> None:
        """Let the ranks end the run."""
        with self._lock:
            run, self._run = self._run, None
        _end(run)


def _end(run: _Open | None) -> None:
    """End a run, and wait until the ranks are free: its connection closes then."""
    if run is None:
        return
    with run.connection, contextlib.suppress(OSError):
        run.connection.shutdown(socket.SHUT_WR)
        if deadlines.wait_for(run.connection, deadlines.READABLE, END_TIMEOUT):
            run.connection.recv(1)
