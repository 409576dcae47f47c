"""A backend that listens for other machines, and a client of another machine, both over 127.0.0.1."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Timeouts
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.links.backends import Gateway
from parallel_backend.protocol.endpoint import GATEWAY_LOG, Endpoint

TIMEOUTS = Timeouts(connect=20.0, silence=30.0, cancel=20.0)


def client_of(address: str) -> Client:
    """Return a client of the backend at an address, which has no runtime folder of its own."""
    remote = Gateway(address=Address.parse(address, what="address"))
    return Client(endpoint=Endpoint(folder=Path("/no/such/folder"), remote=remote), timeouts=TIMEOUTS)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A backend that listens, as a client beside it and one of another machine see it; and a client's certificates."""

    local: Client
    remote: Client
    certificates: Path

    @property
    def gateway(self) -> int:
        """The gateway's process id; 0 if there is none."""
        return gateway_of(self.local)

    def log(self, name: str = GATEWAY_LOG) -> str:
        """A log of the backend."""
        path = self.local.endpoint.logs / name
        return path.read_text() if path.exists() else ""


def gateway_of(local: Client) -> int:
    """Return the process id of a backend's gateway; 0 if there is none."""
    children = psutil.Process(local.status().pid).children()
    return next((child.pid for child in children if "parallel_backend.machines.gateway" in child.cmdline()), 0)
