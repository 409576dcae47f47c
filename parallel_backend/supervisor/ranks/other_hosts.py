"""The interface of sets of ranks to other hosts than the supervisor's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...protocol.model_spec import FIRST, Collectives, Devices
from .rank_start import StartedProcess


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """A rank that is to start on another host.

    Attributes:
        generation: the set that it belongs to.
        device: PyTorch's name of its device.
        collectives: the communication backend of GPU ranks.
        ranks: number of its set's ranks on the host.
        environment: the rank's own variables.
        output: takes the process's output.
    """

    generation: int
    device: str
    collectives: Collectives
    ranks: int
    environment: Mapping[str, str]
    output: int


class OtherHosts(Protocol):
    """The hosts on which agents start ranks."""

    def interface(self, devices: Devices) -> str:
        """The network interface over which ranks on these devices talk; "" for the loopback interface."""

    def missing(self, devices: Devices) -> dict[str, str]:
        """The missing hosts of these devices, and a sentence about each."""

    def start(self, host: str, order: RankOrder) -> StartedProcess:
        """Start a rank on a host.

        Raises:
            OSError: the process has no descriptor left for it.
        """


class NoOtherHosts:
    """This host is the only one."""

    def interface(self, devices: Devices) -> str:
        """No interface."""
        return ""

    def missing(self, devices: Devices) -> dict[str, str]:
        """All but the first."""
        names = sorted(set(devices.hosts) - {FIRST})
        return {host: f"host {host} is not known: the backend was started for one host" for host in names}

    def start(self, host: str, order: RankOrder) -> StartedProcess:
        """Never called, since all other hosts are missing."""
        raise AssertionError(f"host {host} is missing")
