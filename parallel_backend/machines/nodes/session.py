"""What an agent does while its host is joined."""

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ProtocolError
from ...protocol.model_spec import Devices
from ...supervisor.event_loop import READ, EventLoop
from ...supervisor.ranks.rank_start import StartedProcess, adopt, common_environment, start_process, store_environment
from ...supervisor.ranks.spares import Spares
from ..links.address import Address
from ..ranks import COMMAND
from . import host_control
from .hosted_rank import HostedRank
from .store_tunnel import StoreTunnel

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two looks at the clock."""
SILENCE = 8.0
"""Seconds without a message from the supervisor, which asks each second, after which it is gone."""
EXIT = 10.0
"""Seconds that killed ranks have to exit."""
MUCH = 256 << 10
"""Bytes that wait to be sent, above which what ranks write stays in their pipes."""
SUSPENDED = 2.0
"""Seconds between two looks at the clock above which this process itself must have been suspended."""


class Session:
    """A host that has joined.

    Args:
        sock: the connection to the supervisor.
        first_host: where the gateway of the first host listens.
        devices: this host's.
        interface: the network interface over which its ranks reach other hosts.
        events: an event loop.
        spares: the spare ranks of this host, which stay after the end.
        command: starts a rank; options are appended.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        first_host: Address,
        devices: Devices,
        interface: str,
        events: EventLoop,
        spares: Spares,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._first_host, self._devices, self._interface = first_host, devices, interface
        self._command = tuple(command)
        self._events, self._spares = events, spares
        self._adopted: Iterator[StartedProcess] = iter(())
        self._stream = host_control.MessageStream(sock, host_control.ToHost)
        self._ranks: dict[int, HostedRank] = {}
        self._tunnel: StoreTunnel | None = None
        self._idle = False
        self._last_heard = time.monotonic()
        self._ended = ""
        self._events.watch(
            self._stream.fileno(), READ, self._receive, discard=lambda error: self._end(f"failed: {error}")
        )

    def serve(self) -> str:
        """Obey the supervisor until the connection ends. Return why it ended; no rank is left.

        Any end kills the ranks, also an exception such as ``SystemExit``.
        """
        try:
            last = time.monotonic()
            while not self._ended:
                self._events.run_once(TICK)
                self._spares.tick(idle=self._idle)
                self._flush()
                self._check_silence(time.monotonic() - last)
                last = time.monotonic()
        finally:
            self._close()
        return self._ended

    def _flush(self) -> None:
        """Send waiting messages. While many wait, do not read the ranks' output."""
        try:
            self._stream.flush()
        except OSError as error:
            self._end(f"closed the connection ({error})")
        for rank in self._ranks.values():
            rank.pause_output(self._stream.waiting > MUCH)

    def _check_silence(self, elapsed: float) -> None:
        if elapsed > SUSPENDED:
            self._last_heard = time.monotonic()  # messages that arrived meanwhile are read next
        silence = time.monotonic() - self._last_heard
        if silence > SILENCE:
            self._end(f"has not sent anything for {silence:.0f} s")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why

    def _send(self, message: host_control.FromHost) -> None:
        if not self._ended:
            try:
                self._stream.send(message)
            except OSError as error:
                self._end(f"closed the connection ({error})")

    def _receive(self) -> None:
        try:
            messages = self._stream.receive()
        except ProtocolError as error:
            return self._end(f"sent what is no message: {error}")
        except OSError:
            return self._end("closed the connection")
        self._last_heard = time.monotonic()
        for message in messages:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, host_control.StartRank):
            self._start(message)
        elif isinstance(message, host_control.KillRank):
            if message.key in self._ranks:
                self._ranks[message.key].kill()
        else:
            self._idle = message.idle
            self._report(message.number)

    def _report(self, number: int) -> None:
        self._ranks = {key: rank for key, rank in self._ranks.items() if not rank.exited}
        activities = {key: rank.activity() for key, rank in self._ranks.items()}
        known = {key: activity for key, activity in activities.items() if activity}
        spares = self._spares.statuses()
        self._send(host_control.Report(number=number, time=time.time(), ranks=known, spares=spares))

    def _start(self, message: host_control.StartRank) -> None:
        self._idle = False
        try:
            rank = self._ranks[message.key] = HostedRank(
                key=message.key,
                start=lambda output: self._start_process(message, output),
                events=self._events,
                send=self._send,
            )
        except OSError as error:
            self._send(host_control.RankExited(key=message.key, returncode=1, error=str(error)))
        else:
            how = "takes the place of a spare rank" if rank.started.process.was_spare else "started"
            log.info("rank %s on %s %s", message.environment.get("RANK"), message.device, how)

    def _start_process(self, message: host_control.StartRank, output: int) -> StartedProcess:
        local = Devices(kind=self._devices.kind, indices=tuple(range(message.ranks)), visible=self._devices.visible)
        if self._tunnel is None or self._tunnel.generation != message.generation:
            self._close_tunnel()
            self._tunnel = StoreTunnel(self._first_host, message.generation)
            self._adopted = self._spares.take(local)
        common = common_environment(local, interface=self._interface)
        own = message.environment | store_environment(self._tunnel.port)
        if spare := next(self._adopted, None):
            adopt(spare, device=message.device, collectives=message.collectives, common=common, own=own, output=output)
            return spare
        arguments = ["--device", message.device, "--collectives", message.collectives]
        return start_process([*self._command, *arguments], environment=common | own, output=output)

    def _close_tunnel(self) -> None:
        if self._tunnel:
            self._tunnel.close()

    def _close(self) -> None:
        self._end("is told that this host ends")
        self._events.forget(self._stream.fileno())
        self._stream.close()
        self._close_tunnel()
        for rank in self._ranks.values():
            rank.kill()
        overdue = time.monotonic() + EXIT
        while time.monotonic() < overdue and not all(rank.exited for rank in self._ranks.values()):
            self._events.run_once(TICK)
