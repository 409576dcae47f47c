"""The connection to the agent of one host."""

import itertools
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import ProtocolError
from ...protocol.hosts import HostInfo, HostStatus
from ...protocol.status import SpareStatus
from ...supervisor.event_loop import READ, EventLoop
from ...supervisor.ranks.other_hosts import RankOrder
from ...supervisor.ranks.rank_start import StartedProcess
from . import host_control
from .remote_process import LOST, RemoteProcess

log = logging.getLogger(__name__)

PING = 1.0
"""Seconds between two questions to an agent."""


class JoinedHost:
    """A host that has joined.

    Args:
        info: its agent's description.
        sock: the connection to its agent.
        events: the supervisor's event loop.
        on_lost: called once when the host is lost.

    Attributes:
        info: what its agent says about it.
        status: as of its last report.
        spares: its spare ranks, as of its last report.
        last_heard: ``time.monotonic()`` of the last message.
    """

    def __init__(
        self, info: HostInfo, sock: socket.socket, *, events: EventLoop, on_lost: Callable[["JoinedHost"], None]
    ) -> None:
        self.info, self._events, self._on_lost = info, events, on_lost
        self.status = HostStatus(
            node=info.node, state="joined", name=info.name, address=info.address, devices=info.devices,
            versions=info.versions,
        )  # fmt: skip
        self.spares: tuple[SpareStatus, ...] = ()
        self._stream = host_control.MessageStream(sock, host_control.FromHost)
        self._processes: dict[int, RemoteProcess] = {}
        self._keys = itertools.count()
        self._pings: dict[int, float] = {}
        self._next_ping, self._said_idle = 0.0, False
        self.last_heard = time.monotonic()
        events.watch(
            self._stream.fileno(), READ, self._receive,
            discard=lambda error: self.lose(f"the supervisor failed on its message: {error}"),
        )  # fmt: skip

    @property
    def lost(self) -> bool:
        """Whether it was given up."""
        return self.status.state == "lost"

    def start(self, order: RankOrder) -> StartedProcess:
        """Make the agent start a rank."""
        key = next(self._keys)
        process = RemoteProcess(
            host=self.info.name, output=order.output, kill=lambda: self._kill(key), events=self._events
        )
        self._processes[key] = process
        self._send(
            host_control.StartRank(
                key=key, generation=order.generation, device=order.device, collectives=order.collectives,
                ranks=order.ranks, environment=dict(order.environment),
            )
        )  # fmt: skip
        return StartedProcess(process=process, control=process.control, pidfd=process.exited)

    def tick(self, now: float, *, idle: bool) -> None:
        """Ping the agent, and send waiting messages. ``idle`` says whether the backend has nothing to do."""
        if now >= self._next_ping or idle != self._said_idle:
            self._next_ping, self._said_idle = now + PING, idle
            number = next(self._keys)
            self._pings = {n: at for n, at in self._pings.items() if now - at < 60 * PING} | {number: now}
            self._send(host_control.Ping(number=number, idle=idle))
        else:
            self._send(None)

    def lose(self, why: str) -> None:
        """Give the host up: its ranks are gone for this supervisor, and its agent ends them by itself.

        Args:
            why: the end of a sentence about the host.
        """
        if self.lost:
            return
        log.error("host %s (%s) %s", self.info.name, self.info.address, why)
        self._end(why)
        self._on_lost(self)

    def close(self) -> None:
        """Close the connection: the host's ranks are no longer needed."""
        if not self.lost:
            self._end("is not needed any more")

    def _end(self, why: str) -> None:
        self.status = replace(self.status, state="lost", problem=why)
        self._events.forget(self._stream.fileno())
        self._stream.close()
        for process in self._processes.values():
            process.ended(LOST, f"is lost with its host {self.info.name} ({self.info.address}), which {why}")

    def _kill(self, key: int) -> None:
        self._send(host_control.KillRank(key=key))

    def _send(self, message: host_control.ToHost | None) -> None:
        if self.lost:
            return
        try:
            if message is None:
                self._stream.flush()
            else:
                self._stream.send(message)
        except OSError as error:
            self.lose(f"closed its connection ({error})")

    def _receive(self) -> None:
        try:
            messages = self._stream.receive()
        except ProtocolError as error:
            self.lose(f"sent what is no message: {error}")
        except OSError:
            self.lose("closed its connection")
        else:
            self.last_heard = time.monotonic()
            for message in messages:
                self._handle(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, host_control.Report):
            return self._take_report(message)
        process = self._processes.get(message.key)
        if process is None:
            return
        if isinstance(message, host_control.RankStarted):
            process.started(message.pid, was_spare=message.was_spare)
            self.spares = tuple(spare for spare in self.spares if spare.pid != message.pid)
        elif isinstance(message, host_control.RankSaid):
            process.said(bytes(message.message))
        elif isinstance(message, host_control.RankWrote):
            process.wrote(message.text)
        else:
            del self._processes[message.key]
            process.ended(message.returncode, f"does not start: {message.error}" if message.error else "")

    def _take_report(self, report: host_control.Report) -> None:
        for key, activity in report.ranks.items():
            if key in self._processes:
                self._processes[key].report(activity)
        self.spares = tuple(replace(spare, host=self.info.name) for spare in report.spares)
        asked = self._pings.pop(report.number, None)
        if asked is not None:
            round_trip = time.monotonic() - asked
            clock = report.time - (time.time() - round_trip / 2)
            self.status = replace(self.status, round_trip=round_trip, clock=clock)
