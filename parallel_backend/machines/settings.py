"""What ``serve`` is asked about other machines, and what a running backend does otherwise."""

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest
from ..protocol.endpoint import Endpoint
from ..protocol.model_spec import Devices
from ..protocol.status import Status
from ..supervisor.event_loop import EventLoop
from ..supervisor.log_files import LogFiles
from .certificates.tls import Credentials, default_folder
from .gateway.process import Listening
from .links.address import Address
from .links.interfaces import address_of
from .nodes.local_devices import local_devices
from .ranks import COMMAND
from .supervised import Supervised

PORT = 7400
"""Where a backend with several hosts listens, unless an address says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See ``supervisor.other_machines.Machines``.

    Attributes:
        listening: where it listens for other machines; None if it does not.
        nodes: number of hosts whose devices ranks may use.
        interface: the network interface over which ranks of different hosts talk.
        devices: those of this machine, if others are to know them; None for those that it probably has.
        forwarded: whether clients may come through a tunnel.
    """

    listening: Listening | None = None
    nodes: int = 1
    interface: str = ""
    devices: Devices | None = None
    forwarded: bool = False
    rank_command: Sequence[str] = COMMAND

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of ``serve`` that mean this."""
        listen = ("--listen", str(self.listening.address)) if self.listening else ()
        nodes = ("--nnodes", str(self.nodes), "--interface", self.interface) if self.interface else ()
        return (*listen, *nodes, *(("--forwarded",) if self.forwarded else ()))

    def begin(self, *, endpoint: Endpoint, logs: LogFiles, events: EventLoop) -> Supervised:
        """Let other machines in.

        Raises:
            InvalidRequest: nothing can listen where they are to connect.
        """
        return Supervised(
            listening=self.listening, nodes=self.nodes, interface=self.interface, devices=self.devices,
            endpoint=endpoint, logs=logs, events=events,
        )  # fmt: skip

    def advice(self, endpoint: Endpoint) -> list[str]:
        """Return what whoever starts this has to know and do elsewhere."""
        if self.forwarded:
            ssh = "ssh -N -o ExitOnForwardFailure=yes -o StreamLocalBindUnlink=yes -o ServerAliveInterval=5"
            return [f"on ComfyUI's machine, run: {ssh} -L FOLDER/socket:{endpoint.socket} {socket.gethostname()}"]
        if self.nodes == 1 or not self.listening:
            return []
        warning = (
            f"ranks of different hosts talk over {self.interface} without encryption or authentication: nobody else "
            "may be in that network"
        )
        command = (
            f"python -m parallel_backend host --connect {self.listening.address} --interface NAME --node "
            f"{'1' if self.nodes == 2 else f'1 to {self.nodes - 1}'}"
        )
        return [warning, f"on the other hosts, with the files of this one's certificates, run: {command}"]

    def difference(self, status: Status, listen: str | None) -> str:
        """Return what a backend does otherwise, as the end of a sentence; "" for nothing.

        ``listen`` is the address that was asked for, if one was.
        """
        if self.forwarded and not status.hosts:
            return "was not started with --forwarded"
        if self.listening and not status.listens:
            return "does not listen for other machines"
        if self.listening and len(status.hosts) != self.nodes:
            return f"was started with --nnodes {len(status.hosts)}"
        address = self.listening and self.listening.address
        if listen and address and address.port and status.listens.partition(",")[0] != str(address):
            return f"listens at {status.listens}"
        if self.interface not in ("", status.interface):
            return f"was started with --interface {status.interface}"
        return ""


def parse(options: argparse.Namespace) -> Settings:
    """Check the options of ``serve`` for other machines.

    Raises:
        InvalidRequest: one of them does not fit.
    """
    if options.nnodes < 1 or (options.nnodes > 1) != bool(options.interface):
        raise InvalidRequest(
            f"--nnodes {options.nnodes} with --interface {options.interface or 'missing'}: several hosts need the name "
            "of the private network interface between them, and one host has no use for it"
        )
    listen = options.listen or (f"{address_of(options.interface)}:{PORT}" if options.interface else "")
    return Settings(
        listening=listening_at(listen) if listen else None,
        forwarded=options.forwarded,
        nodes=options.nnodes,
        interface=options.interface,
        devices=None if options.detach else local_devices("all"),
    )


def listening_at(text: str) -> Listening:
    """Return where to listen for other machines, once the certificates for that are known to be usable.

    Raises:
        InvalidRequest: it is no address, or a certificate is missing or unusable.
    """
    address, folder = Address.parse(text, what="--listen"), default_folder()
    Credentials.of_server(folder).server_context()
    return Listening(address=address, certificates=folder)
