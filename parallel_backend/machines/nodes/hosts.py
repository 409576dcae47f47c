"""The expected hosts, and the joined ones."""

import logging
import socket
import time

from ...errors import BackendUnavailable, InvalidRequest
from ...protocol.hosts import HostInfo, HostStatus, versions
from ...protocol.messages import Done
from ...protocol.model_spec import FIRST, Devices
from ...protocol.status import SpareStatus
from ...supervisor.event_loop import EventLoop
from ...supervisor.listener import answer, refuse
from ...supervisor.ranks.expected_devices import expected_devices
from ...supervisor.ranks.other_hosts import RankOrder
from ...supervisor.ranks.rank_start import NotStarted, StartedProcess
from .joined_host import JoinedHost

log = logging.getLogger(__name__)

SILENCE = 6.0
"""Seconds without a message after which a host is lost: fewer than for a rank, so that the host is named."""
REPLACE = 3.0
"""Seconds without a message after which an agent's new connection takes the place of its old one."""
ANNOUNCE = 30.0
"""Seconds between two lines in the log about hosts that are missing."""


class Hosts:
    """All hosts but the first.

    Args:
        nodes: number of expected hosts, with the first one.
        interface: the network interface over which ranks of different hosts talk.
        devices: of the first host; None: guess.
        events: the supervisor's event loop.
    """

    def __init__(self, *, nodes: int, interface: str, devices: Devices | None, events: EventLoop) -> None:
        self._expected, self.name_of_interface, self._events = nodes, interface, events
        self._links: dict[str, JoinedHost] = {}
        self._gone: dict[int, HostStatus] = {}
        self._versions, self._devices = versions(), devices or expected_devices()
        self._next_announcement = 0.0

    def join(self, sock: socket.socket, info: HostInfo, *, same_program: bool) -> None:
        """Let a host join, or refuse it. ``same_program`` says whether it runs the same files as this process."""
        try:
            if not same_program:
                raise InvalidRequest(
                    f"host {info.name} has another version of Parallel DiT than the first host: install the same one"
                )
            self._check(info)
        except (InvalidRequest, BackendUnavailable) as error:
            log.warning("host %s (%s) is refused: %s", info.name, info.address, error)
            return refuse(sock, error)
        answer(sock, Done())
        self._links[info.name] = JoinedHost(info, sock, events=self._events, on_lost=self._forget)
        self._gone.pop(info.node, None)
        log.info("host %s (%s) has joined as host %d with %s", info.name, info.address, info.node, info.devices)

    def _check(self, info: HostInfo) -> None:
        if info.node >= self._expected:
            raise InvalidRequest(
                f"host {info.name} has the number {info.node}, and the backend was started for {self._expected} hosts: "
                f"--nnodes {info.node + 1} there would work"
            )
        for package in sorted(self._versions.keys() | info.versions.keys()):
            ours, theirs = (each.get(package, "none") for each in (self._versions, info.versions))
            if ours != theirs:
                raise InvalidRequest(
                    f"host {info.name} has {package} {theirs}, and the first host has {ours}: install the same version"
                )
        alike = [link for link in self._links.values() if info.name == link.info.name or info.node == link.info.node]
        for link in alike:
            if time.monotonic() - link.last_heard < REPLACE:
                same = f"the name {info.name}" if info.name == link.info.name else f"the number {info.node}"
                raise BackendUnavailable(f"a host with {same} has joined from {link.info.address}: give it another one")
        for link in alike:
            link.lose("has connected again")

    def _forget(self, link: JoinedHost) -> None:
        if self._links.get(link.info.name) is link:
            del self._links[link.info.name]
        self._gone[link.info.node] = link.status

    def interface(self, devices: Devices) -> str:
        """The network interface over which ranks on these devices talk; "" for the loopback interface."""
        return self.name_of_interface if devices.hosts else ""

    def missing(self, devices: Devices) -> dict[str, str]:
        """The missing hosts of these devices, and a sentence about each."""
        return {host: self._absence(host) for host in sorted(set(devices.hosts) - {FIRST} - self._links.keys())}

    def _absence(self, host: str) -> str:
        gone = next((status for status in self._gone.values() if status.name == host), None)
        return f"host {host} ({gone.address}) {gone.problem}" if gone else f"host {host} has not joined"

    def start(self, host: str, order: RankOrder) -> StartedProcess:
        """Start a rank on a host, see ``JoinedHost.start``.

        Raises:
            NotStarted: the host is missing.
        """
        if host not in self._links:
            raise NotStarted(self._absence(host), ranks=(int(order.environment["RANK"]),))
        return self._links[host].start(order)

    def tick(self, *, idle: bool) -> None:
        """Give up silent hosts, ping the others, and log which are missing.

        ``idle`` says whether the backend has nothing to do.
        """
        now = time.monotonic()
        for link in list(self._links.values()):
            if now - link.last_heard > SILENCE:
                link.lose(f"has not answered for {now - link.last_heard:.0f} s")
            else:
                link.tick(now, idle=idle)
        missing = self._missing()
        if missing and now >= self._next_announcement:
            self._next_announcement = now + ANNOUNCE
            names = " and ".join(f"host {node}" for node in missing)
            log.info("%s of %d: not there yet", names, self._expected)

    def _missing(self) -> list[int]:
        there = {link.info.node for link in self._links.values()}
        return [node for node in range(1, self._expected) if node not in there]

    def statuses(self) -> tuple[HostStatus, ...]:
        """All hosts, with the first one."""
        first = HostStatus(
            node=0, state="joined", name=socket.gethostname(), devices=self._devices, versions=self._versions, clock=0.0
        )
        others = {link.info.node: link.status for link in self._links.values()}
        missing = {node: self._gone.get(node) or HostStatus(node=node, state="missing") for node in self._missing()}
        return (first, *(status for _, status in sorted((others | missing).items())))

    def spares(self) -> tuple[SpareStatus, ...]:
        """The spare ranks of the hosts that have joined."""
        return tuple(spare for link in self._links.values() for spare in link.spares)

    def close(self) -> None:
        """Close all connections; the agents end their ranks and wait for another supervisor."""
        for link in list(self._links.values()):
            link.close()
