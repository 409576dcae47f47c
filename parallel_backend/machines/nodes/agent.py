"""Joins this host to a backend on another one, and joins again whenever the connection ends."""

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import BackendFailure, from_code
from ...protocol import frames
from ...protocol.deadlines import Deadline
from ...protocol.hosts import HostInfo, JoinHost
from ...protocol.messages import Done, Error
from ...supervisor.event_loop import EventLoop
from ...supervisor.ranks.spares import Spares
from ..links.address import Address
from ..links.remote import connect
from ..ranks import COMMAND
from .session import EXIT, TICK, Session

log = logging.getLogger(__name__)

JOIN_TIMEOUT = 20.0
"""Seconds that the backend has to answer."""
RETRY = 1.0
"""Seconds between two attempts to join."""
REMIND = 60.0
"""Seconds between two lines in the log that say the same."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The agent of one host.

    Attributes:
        info: the host.
        first_host: where the backend's gateway listens.
        interface: the network interface over which its ranks reach other hosts.
        spares: number of spare ranks; None for the last set's number of ranks here, as far as memory allows.
        command: starts a rank; options are appended.
    """

    info: HostInfo
    first_host: Address
    interface: str
    spares: int | None = None
    command: Sequence[str] = COMMAND

    def run(self) -> None:
        """Serve until the process is ended. Ranks run only while there is a connection.

        Spare ranks stay without a connection, ready for the next one.

        Raises:
            InvalidRequest: the backend refuses this host, or this host's certificates cannot be used.
        """
        events = EventLoop()
        spares = Spares(command=self.command, number=self.spares, events=events, devices=self.info.devices)
        try:
            self._join_and_serve(events, spares)
        finally:
            spares.kill()
            overdue = time.monotonic() + EXIT
            while not spares.exited and time.monotonic() < overdue:
                events.run_once(TICK)

    def _join_and_serve(self, events: EventLoop, spares: Spares) -> None:
        said, said_at = "", 0.0
        while True:
            try:
                sock = self._join()
            except (BackendFailure, OSError) as error:
                if str(error) != said or time.monotonic() - said_at > REMIND:
                    said, said_at = str(error), time.monotonic()
                    log.warning("waiting for the first host: %s", error)
            else:
                said = ""
                self._serve(sock, events, spares)
            time.sleep(RETRY)

    def _serve(self, sock: socket.socket, events: EventLoop, spares: Spares) -> None:
        log.info("joined the backend at %s as host %d, %s", self.first_host, self.info.node, self.info.name)
        session = Session(
            sock, first_host=self.first_host, devices=self.info.devices, interface=self.interface, events=events,
            spares=spares, command=self.command,
        )  # fmt: skip
        log.warning("the first host %s; the ranks here are ended", session.serve())

    def _join(self) -> socket.socket:
        deadline = Deadline(JOIN_TIMEOUT, f"joining the backend at {self.first_host}")
        sock = connect(self.first_host, seconds=JOIN_TIMEOUT)
        try:
            message = JoinHost(host=self.info)
            frames.send_header(sock, frames.pack(frames.Frame(message=message)), deadline=deadline)
            answer = frames.recv_header(sock, deadline=deadline).message
            if isinstance(answer, Error):
                raise from_code(answer.code, answer.message)
            if not isinstance(answer, Done):
                raise BackendFailure(f"the backend answered {type(answer).__name__} where Done was expected")
        except BaseException:
            sock.close()
            raise
        return sock
