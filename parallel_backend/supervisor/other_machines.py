"""The supervisor's interface to ``machines``, for clients or ranks on other machines."""

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from ..protocol.endpoint import Endpoint
from ..protocol.model_spec import Devices
from ..protocol.status import Status
from .event_loop import EventLoop
from .log_files import LogFiles
from .ranks.other_hosts import OtherHosts


class OtherMachines(OtherHosts, Protocol):
    """The other machines of one supervisor."""

    def take(
        self, sock: socket.socket, message: object, *, same_program: bool, store_port: Callable[[int], int | None]
    ) -> bool:
        """Take a connection if its first message comes from another machine. Return whether it does.

        Args:
            sock: the connection. If this returns true, the caller no longer owns it.
            message: the message.
            same_program: whether the sender runs the same files as this process.
            store_port: returns the port of a set's store by the set's generation; None if the set has ended.
        """

    def tick(self, *, idle: bool) -> None:
        """Do periodic work. ``idle`` says whether the backend has nothing to do."""

    def added_to(self, status: Status) -> Status:
        """Return a status with other machines added."""

    def end(self) -> None:
        """Accept no more connections."""

    def close(self) -> None:
        """Close the connections to other hosts."""

    def wait(self, seconds: float) -> None:
        """Let the last bytes arrive, for at most ``seconds``."""


class Machines(Protocol):
    """The settings about other machines with which this backend was started."""

    @property
    def rank_command(self) -> Sequence[str]:
        """Starts a rank; options are appended."""

    @property
    def devices(self) -> Devices | None:
        """Devices of this machine, to announce to other hosts; None: guess."""

    def begin(self, *, endpoint: Endpoint, logs: LogFiles, events: EventLoop) -> OtherMachines:
        """Let others in.

        Raises:
            InvalidRequest: nothing can listen on the address.
        """
