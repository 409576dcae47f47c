"""A rank's line to its supervisor: jobs and cancels in, heartbeats out, and the life line itself.

One thread, started before torch is imported. When the supervisor's end closes, however it ended, the
process exits at once.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocol import frames, rank_control
from ..protocol.messages import RankStatus

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between heartbeats."""


@dataclass(kw_only=True)
class ReceivedRequest:
    """A request and the connection of its client."""

    frame: frames.Frame
    header: bytes
    connection: socket.socket
    cancelled: threading.Event = field(default_factory=threading.Event)


class SupervisorLink:
    """Owns the control socket. ``describe`` gives what a heartbeat says, and is called from the link's thread."""

    def __init__(self, control_socket: socket.socket, *, describe: Callable[[], RankStatus]) -> None:
        self._control, self.describe = control_socket, describe
        self._jobs: queue.Queue[ReceivedRequest] = queue.Queue()
        self._current: ReceivedRequest | None = None

    def start(self) -> None:
        """Start listening and beating."""
        threading.Thread(target=self._live, name="link", daemon=True).start()

    def ready(self) -> None:
        """Tell that the process group stands."""
        rank_control.send(self._control, rank_control.Ready())

    def take(self, seconds: float) -> ReceivedRequest | None:
        """The next job, or None if none came in time."""
        try:
            return self._jobs.get(timeout=seconds)
        except queue.Empty:
            return None

    def finished(self, finished: rank_control.Finished) -> None:
        """Tell how a request ended here, and what the rank is like after it.

        Waits for as long as the supervisor does not read: if it were not alive, this process would not be.
        """
        self._beat()
        while True:
            try:
                rank_control.send(self._control, finished)
                return
            except BlockingIOError:
                time.sleep(BEAT / 10)

    def _live(self) -> None:
        try:
            self._loop()
        except ConnectionError:
            os._exit(0)
        except BaseException:
            log.exception("the link to the supervisor broke")
            os._exit(70)

    def _loop(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        beat = 0.0
        while True:
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                self._beat()
            if poller.poll(max(0.0, beat - time.monotonic()) * 1000):
                self._hear()

    def _beat(self) -> None:
        with contextlib.suppress(BlockingIOError):
            rank_control.send(self._control, rank_control.Heartbeat(status=self.describe()))

    def _hear(self) -> None:
        message, descriptor = rank_control.receive(self._control, rank_control.ToRank)
        if isinstance(message, rank_control.Run):
            if descriptor is None:
                raise RuntimeError("a request came without its connection")
            header = bytes(message.header)
            connection = socket.socket(fileno=descriptor)
            self._current = ReceivedRequest(frame=frames.unpack(header), header=header, connection=connection)
            self._jobs.put(self._current)
        elif self._current and self._current.frame.message.request_id == message.request_id:
            self._current.cancelled.set()
