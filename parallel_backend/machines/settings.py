"""The options of ``serve`` about other machines, and how a running backend differs from them."""

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
        listening: address and certificates for other machines; None if it does not listen.
        nodes: number of hosts whose devices ranks may use.
        interface: the network interface over which ranks of different hosts talk.
        devices: of this machine, to announce to other hosts; None: guess.
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
        """These settings as options of ``serve``."""
        listen = ("--listen", str(self.listening.address)) if self.listening else ()
        nodes = ("--nnodes", str(self.nodes), "--interface", self.interface) if self.interface else ()
        return (*listen, *nodes, *(("--forwarded",) if self.forwarded else ()))

    def begin(self, *, endpoint: Endpoint, logs: LogFiles, events: EventLoop) -> Supervised:
        """Let other machines in.

        Raises:
            InvalidRequest: nothing can listen on the address.
        """
        return Supervised(
            listening=self.listening, nodes=self.nodes, interface=self.interface, devices=self.devices,
            endpoint=endpoint, logs=logs, events=events,
        )  # fmt: skip

    def advice(self, endpoint: Endpoint) -> list[str]:
        """Return notes for the user: what to know, and what to do on other machines."""
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
        """Return how a running backend differs, as the end of a sentence; "" if it does not.

        ``listen`` is the requested address, if any.
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
        InvalidRequest: an option does not fit.
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
    """Check the certificates, and return where to listen for other machines.

    Raises:
        InvalidRequest: it is no address, or a certificate is missing or unusable.
    """
    address, folder = Address.parse(text, what="--listen"), default_folder()
    Credentials.of_server(folder).server_context()
    return Listening(address=address, certificates=folder)
