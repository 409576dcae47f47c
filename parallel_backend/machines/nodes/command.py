"""``python -m parallel_backend host``: make this host's devices part of a backend on another host."""

import argparse
import logging
import os
import socket
import sys
from dataclasses import dataclass

from ... import serve
from ...errors import InvalidRequest
from ...protocol.endpoint import Endpoint
from ...protocol.hosts import HostInfo, versions
from ...supervisor.ranks.compiled_code import keep_compiled_code
from ..links.address import Address
from ..links.interfaces import address_of, is_here
from ..settings import PORT, Settings, listening_at
from .agent import Agent
from .local_devices import local_devices

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launcher's environment variables (torchrun, srun with the usual exports, a Kubernetes Job).

    Attributes:
        node: the number of this host, 0 for the first; None without a launcher.
        nodes: number of hosts.
        first: the first host's name or address.
    """

    node: int | None = None
    nodes: int = 1
    first: str = ""

    @classmethod
    def read(cls) -> "Launched":
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` and ``MASTER_ADDR``.

        Raises:
            InvalidRequest: they are not numbers, or the launcher starts several processes on a host.
        """
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not rank and not size:
            return cls()
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InvalidRequest(f"RANK={rank} and WORLD_SIZE={size}: must be numbers, of which the first is smaller")
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if local != "1":
            raise InvalidRequest(
                f"LOCAL_WORLD_SIZE={local}: one process starts all ranks of its host, so --nproc-per-node 1 (torchrun) "
                "or --ntasks-per-node 1 (srun) would work"
            )
        return cls(node=int(rank), nodes=int(size), first=os.environ.get("MASTER_ADDR", ""))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    parser.add_argument(
        "--connect", metavar="ADDRESS[:PORT]",
        help=f"where the first host listens (default: MASTER_ADDR, which launchers set, and port {PORT})",
    )  # fmt: skip
    parser.add_argument(
        "--interface",
        required=True,
        metavar="NAME",
        help="the private network interface over which ranks of different hosts talk, without encryption",
    )
    parser.add_argument(
        "--node", type=int, metavar="N", help="number of this host, from 1 (default: RANK, which launchers set)"
    )
    parser.add_argument("--name", help="name of this host in devices, status and errors (default: its host name)")
    parser.add_argument(
        "--devices", metavar="LIST", help='numbers of the devices that ranks may use, such as "0,1" (default: all)'
    )
    serve.add_spares(parser)


def run(options: argparse.Namespace) -> int:
    """Join, and serve until the process is ended. On a launcher's first host, serve the backend instead.

    Raises:
        BackendError: an option does not fit, the backend refuses this host, or does not start here.
    """
    launched = Launched.read()
    if options.node is None and launched.node == 0:
        return serve.serve(_first_host_of(options, launched))
    agent = parse(options, launched)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s host: %(message)s", stream=sys.stderr)
    if note := keep_compiled_code(Endpoint.default()):
        log.warning(note)
    agent.run()
    return 0


def parse(options: argparse.Namespace, launched: Launched) -> Agent:
    """Return the agent for the options and the launcher.

    Raises:
        InvalidRequest: an option does not fit.
    """
    node = launched.node if options.node is None else options.node
    if node is None:
        raise InvalidRequest("the host has no number: --node 1 for the first of the other hosts would work")
    info = HostInfo(
        name=options.name or socket.gethostname(),
        node=node,
        address=address_of(options.interface),
        devices=local_devices(options.devices or "all"),
        versions=versions(),
    )
    return Agent(
        info=info,
        first_host=_first_host(options.connect, launched),
        interface=options.interface,
        spares=serve.spares_asked(options.spares),
    )


def _first_host_of(options: argparse.Namespace, launched: Launched) -> serve.Serving:
    """Return the settings of the backend on a launcher's first host.

    Raises:
        InvalidRequest: an option does not fit.
    """
    here = launched.first if is_here(launched.first) else address_of(options.interface)
    return serve.Serving(
        endpoint=serve.own_endpoint(),
        idle_timeout=lambda: 0.0,
        spares=serve.spares_asked(options.spares),
        machines=Settings(
            listening=listening_at(options.connect or f"{here}:{PORT}"),
            nodes=launched.nodes,
            interface=options.interface,
            devices=local_devices(options.devices or "all"),
        ),
    )


def _first_host(option: str | None, launched: Launched) -> Address:
    text = option or launched.first
    if not text:
        raise InvalidRequest("the first host is not known: --connect ADDRESS:PORT, as serve prints it, would work")
    return Address.parse(text if ":" in text else f"{text}:{PORT}", what="--connect" if option else "MASTER_ADDR")
