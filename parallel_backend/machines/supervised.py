"""The other machines of one supervisor: their gateway, and the joined hosts."""

import socket
from collections.abc import Callable
from dataclasses import replace

from ..errors import BackendUnavailable
from ..protocol.endpoint import Endpoint
from ..protocol.hosts import JoinHost, OpenStore, StorePort
from ..protocol.messages import Error
from ..protocol.model_spec import Devices
from ..protocol.status import Status
from ..supervisor.event_loop import EventLoop
from ..supervisor.listener import answer
from ..supervisor.log_files import LogFiles
from .gateway.process import GatewayProcess, Listening
from .nodes.hosts import Hosts


class Supervised(Hosts):
    """See ``supervisor.other_machines.OtherMachines``.

    Args:
        listening: address and certificates for them; None if it does not listen.
        nodes: number of hosts whose devices ranks may use.
        interface: the network interface over which ranks of different hosts talk.
        devices: of this machine; None: guess.
        endpoint: the supervisor's.
        logs: take the gateway's output.
        events: the supervisor's event loop.

    Raises:
        InvalidRequest: nothing can listen there.
    """

    def __init__(
        self,
        *,
        listening: Listening | None,
        nodes: int,
        interface: str,
        devices: Devices | None,
        endpoint: Endpoint,
        logs: LogFiles,
        events: EventLoop,
    ) -> None:
        super().__init__(nodes=nodes, interface=interface, devices=devices, events=events)
        self._by_hand, self._gateway = endpoint.by_hand, None
        if listening:
            self._gateway = GatewayProcess(listening=listening, endpoint=endpoint, logs=logs, events=events)
        self._by_hand.touch()

    def take(
        self, sock: socket.socket, message: object, *, same_program: bool, store_port: Callable[[int], int | None]
    ) -> bool:
        """Take a connection of a host that joins, or of the gateway for a rank that needs the store."""
        if isinstance(message, JoinHost):
            self.join(sock, message.host, same_program=same_program)
        elif isinstance(message, OpenStore):
            port, gone = store_port(message.generation), f"generation {message.generation} of the ranks has ended"
            answer(sock, Error(code=BackendUnavailable.code, message=gone) if port is None else StorePort(port=port))
            sock.close()
        else:
            return False
        return True

    def tick(self, *, idle: bool) -> None:
        """Start the gateway if none runs, and see to the hosts."""
        if self._gateway:
            self._gateway.tick()
        super().tick(idle=idle)

    def added_to(self, status: Status) -> Status:
        """Return a status with the hosts, their spare ranks, and this host's address."""
        return replace(
            status, spares=status.spares + self.spares(), hosts=self.statuses(), interface=self.name_of_interface,
            listens=str(self._gateway or ""),
        )  # fmt: skip

    def end(self) -> None:
        """Accept no more connections."""
        self._by_hand.unlink(missing_ok=True)
        if self._gateway:
            self._gateway.end()

    def wait(self, seconds: float) -> None:
        """Let the gateway pass on the last bytes, for at most ``seconds``."""
        if self._gateway:
            self._gateway.wait(seconds)
