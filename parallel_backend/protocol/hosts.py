"""Messages between hosts and the supervisor until a host has joined, and the hosts in a status."""

import importlib.metadata
from dataclasses import dataclass, field
from typing import Literal

from ..errors import InvalidRequest
from .model_spec import Devices

MAX_NAME = 64
"""Characters of a host's name, which logs, errors and the status show."""


PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "diffusers")
"""Packages whose versions have to be the same on all hosts, where they are installed."""


def versions() -> dict[str, str]:
    """The versions of the installed ``PACKAGES``."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_name(name: str) -> None:
    """Refuse a name that does not fit into a list of devices.

    Raises:
        InvalidRequest: it is empty, too long, or has a character other than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not 0 < len(name) <= MAX_NAME or not all(each.isalnum() or each in "._-" for each in name):
        raise InvalidRequest(f"host name {name!r}: must have 1 to {MAX_NAME} letters, digits, '.', '_' or '-'")


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A host, as its agent describes it.

    Attributes:
        name: its name, which no other host may have.
        node: its number among the hosts, from 1; the first host is 0.
        address: of the interface that its ranks use.
        devices: those that its ranks may run on.
        versions: of the packages that must agree on all ranks.

    Raises:
        InvalidRequest: the name or the number cannot be.
    """

    name: str
    node: int
    address: str
    devices: Devices
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.node < 1:
            raise InvalidRequest(f"host {self.name}: its number must be 1 or more, not {self.node}")


@dataclass(frozen=True, kw_only=True)
class JoinHost:
    """From an agent: its host joins. After the answer ``Done``, messages of ``host_control`` follow."""

    host: HostInfo


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """From an agent: which port of the first host's loopback interface has the store of this set of ranks?"""

    generation: int


@dataclass(frozen=True, kw_only=True)
class StorePort:
    """The answer to ``OpenStore``."""

    port: int


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """A host that is expected or has joined.

    Attributes:
        node: its number, 0 for the first host.
        state: whether it has joined, has never been heard of, or was lost.
        name: its name, "" while it is not known.
        address: of the interface that its ranks use.
        devices: those that its ranks may run on, None while they are not known.
        round_trip: of a message to its agent and back, in seconds; None while it is not known.
        clock: how many seconds its clock is ahead of the first host's, to half of a round trip.
        versions: of the packages that all ranks have to agree in.
        problem: why it was lost, or refused last; "" for neither.
    """

    node: int
    state: Literal["joined", "missing", "lost"]
    name: str = ""
    address: str = ""
    devices: Devices | None = None
    round_trip: float | None = None
    clock: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
