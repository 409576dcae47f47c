"""How each rank of a set starts: as a new process, from a spare rank, or on another host."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...protocol.model_spec import FIRST, Devices
from .other_hosts import OtherHosts, RankOrder
from .rank_start import (
    StartedProcess,
    adopt,
    common_environment,
    own_environment,
    start_process,
    store_environment,
)


@dataclass(frozen=True, kw_only=True)
class SetStart:
    """The start of one set.

    Attributes:
        generation: the set's number.
        devices: the devices of its ranks.
        command: starts a rank; options are appended.
        hosts: the other hosts.
        store: the listening socket for the store of rank 0.
        spares: spare ranks, which become the first ranks of this host. Takes only as many as needed.
    """

    generation: int
    devices: Devices
    command: Sequence[str]
    hosts: OtherHosts
    store: socket.socket
    spares: Iterator[StartedProcess]

    def start(self, rank: int, output: int) -> tuple[StartedProcess, str]:
        """Start a rank.

        Args:
            rank: its number.
            output: takes its process's output.

        Returns:
            The process, and how it was started, as a sentence's predicate.

        Raises:
            OSError: it does not start.
        """
        host = self.devices.host_of(rank)
        if host != FIRST:
            return self._start_on_host(rank, host, output), f"is asked for on host {host}"
        if spare := next(self.spares, None):
            return self._adopt(rank, spare, output), "takes the place of a spare rank"
        return self._start_new(rank, output), "started"

    def _environments(self, rank: int) -> tuple[dict[str, str], dict[str, str]]:
        common = common_environment(self.devices, interface=self.hosts.interface(self.devices))
        return common, own_environment(rank, self.devices) | store_environment(self.store.getsockname()[1])

    def _start_new(self, rank: int, output: int) -> StartedProcess:
        common, own = self._environments(rank)
        arguments = ["--device", self.devices.of_rank(rank), "--collectives", self.devices.collectives]
        pass_fds = [self.store.fileno()] if rank == 0 else []
        arguments += ["--store-fd", str(self.store.fileno())] if rank == 0 else []
        return start_process([*self.command, *arguments], environment=common | own, output=output, pass_fds=pass_fds)

    def _adopt(self, rank: int, spare: StartedProcess, output: int) -> StartedProcess:
        """Make a spare rank this rank."""
        common, own = self._environments(rank)
        adopt(
            spare, device=self.devices.of_rank(rank), collectives=self.devices.collectives,
            common=common, own=own, output=output, store=self.store.fileno() if rank == 0 else None,
        )  # fmt: skip
        return spare

    def _start_on_host(self, rank: int, host: str, output: int) -> StartedProcess:
        order = RankOrder(
            generation=self.generation,
            device=self.devices.of_rank(rank),
            collectives=self.devices.collectives,
            ranks=self.devices.on_host(host),
            environment=own_environment(rank, self.devices),
            output=output,
        )
        return self.hosts.start(host, order)
