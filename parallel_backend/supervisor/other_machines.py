"""What the supervisor asks of ``machines`` where clients or ranks are on other machines."""

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
        """Take a connection whose first message comes from another machine. Return whether this one does.

        Args:
            sock: the connection, which is not the caller's any more if this is true.
            message: the message.
            same_program: whether the sender runs the same files as this process.
            store_port: returns where the store of a set of ranks is, by its generation; None if the set has ended.
        """

    def tick(self, *, idle: bool) -> None:
        """Do what is due. ``idle`` says whether the backend has nothing to do."""

    def added_to(self, status: Status) -> Status:
        """Return a status with what other machines add to it."""

    def end(self) -> None:
        """Let nobody in any more."""

    def close(self) -> None:
        """Close the connections to other hosts."""

    def wait(self, seconds: float) -> None:
        """Let what was sent last arrive, but not for longer than this."""


class Machines(Protocol):
    """What was asked for about other machines, when this backend was started."""

    @property
    def rank_command(self) -> Sequence[str]:
        """Starts a rank; options are appended."""

    @property
    def devices(self) -> Devices | None:
        """Those of this machine, if others are to know them; None for those that it probably has."""

    def begin(self, *, endpoint: Endpoint, logs: LogFiles, events: EventLoop) -> OtherMachines:
        """Let others in.

        Raises:
            InvalidRequest: nothing can listen where they are to connect.
        """
