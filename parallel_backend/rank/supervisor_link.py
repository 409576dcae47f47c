"""A rank's connection to its supervisor: receives requests and cancels, sends heartbeats and results.

It runs in one thread, started before torch is imported. When the supervisor's end closes for any reason, the process
exits at once.
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

from ..errors import ProtocolError, RankFailed, shortened
from ..protocol import frames, rank_control
from ..protocol.status import RankStatus

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
"""Seconds between heartbeats."""


@dataclass(kw_only=True)
class ReceivedRequest:
    """A request and the connection of its client.

    Attributes:
        gives_way: whether another request waits.
    """

    frame: frames.Frame
    header: bytes
    connection: socket.socket
    cancelled: threading.Event = field(default_factory=threading.Event)
    gives_way: threading.Event = field(default_factory=threading.Event)


class SupervisorLink:
    """Owns the control socket. ``describe`` returns the status for a heartbeat; any thread may call it."""

    def __init__(self, control_socket: socket.socket, *, describe: Callable[[], RankStatus]) -> None:
        self._control, self.describe = control_socket, describe
        self._requests: queue.Queue[ReceivedRequest] = queue.Queue()
        self._current: ReceivedRequest | None = None
        self._heartbeat_lock = threading.Lock()

    def start(self) -> None:
        """Start the thread that receives messages and sends heartbeats."""
        threading.Thread(target=self._run, name="link", daemon=True).start()

    def report_ready(self) -> None:
        """Report that this rank has joined the process group, and its status then."""
        self._send_heartbeat()
        rank_control.send(self._control, rank_control.Ready())

    def take(self, seconds: float) -> ReceivedRequest | None:
        """The next request, or None if none arrived within ``seconds``."""
        try:
            return self._requests.get(timeout=seconds)
        except queue.Empty:
            return None

    def report_finished(self, finished: rank_control.Finished) -> None:
        """Report how a request ended on this rank, and the rank's status after it."""
        self._send_heartbeat()
        self._send(finished)

    def _send(self, message: rank_control.FromRank) -> None:
        """Send a message.

        Blocks while the supervisor does not read, without a deadline: if the supervisor dies, so does this process.
        """
        while True:
            try:
                rank_control.send(self._control, message)
                return
            except BlockingIOError:
                time.sleep(HEARTBEAT_INTERVAL / 10)

    def _run(self) -> None:
        try:
            self._loop()
        except ConnectionError:
            os._exit(0)
        except BaseException:
            log.exception("the link to the supervisor failed")
            os._exit(70)

    def _loop(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        next_heartbeat = 0.0
        while True:
            if time.monotonic() >= next_heartbeat:
                next_heartbeat = time.monotonic() + HEARTBEAT_INTERVAL
                self._send_heartbeat()
            if poller.poll(max(0.0, next_heartbeat - time.monotonic()) * 1000):
                self._receive()

    def _send_heartbeat(self) -> None:
        # Without the lock, one thread's older status could arrive after another thread's newer one.
        with self._heartbeat_lock, contextlib.suppress(BlockingIOError):
            rank_control.send(self._control, rank_control.Heartbeat(status=self.describe()))

    def _receive(self) -> None:
        try:
            self._take_message()
        except ProtocolError as error:
            text = f"got a message from the supervisor that cannot be read: {error}"
            self.report_finished(rank_control.Finished(request_id="", code=RankFailed.code, message=shortened(text)))

    def _take_message(self) -> None:
        message, descriptors = rank_control.receive(self._control, rank_control.ToRank)
        if isinstance(message, rank_control.Run):
            if not descriptors:
                raise RuntimeError("a request arrived without its connection")
            header, connection = bytes(message.header), socket.socket(fileno=descriptors[0])
            try:
                frame = frames.unpack(header)
            except ProtocolError:
                connection.close()
                raise
            self._current = ReceivedRequest(frame=frame, header=header, connection=connection)
            self._requests.put(self._current)
        elif self._current and self._current.frame.message.request_id == message.request_id:
            gives_way = isinstance(message, rank_control.GiveWay)
            (self._current.gives_way if gives_way else self._current.cancelled).set()
