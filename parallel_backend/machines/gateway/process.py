"""The gateway's process as the supervisor sees it: started, started again when it dies, and ended with the backend.

The supervisor makes the listening socket and never reads from it, so that a port that is in use is an error of
``serve``, and connections wait while a new gateway starts.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ... import last_words, processes
from ...protocol.endpoint import GATEWAY_LOG, Endpoint
from ...supervisor.event_loop import READ, EventLoop
from ...supervisor.log_files import MAX_LINE, LogFiles
from ..links.address import UNSPECIFIED, Address, bound_to, listen_on

log = logging.getLogger(__name__)

BACKLOG = 128
TICK = 0.25
"""Seconds between two looks at the clock while it ends."""
MAX_DELAY = 30.0
"""Longest time in seconds from the death of a gateway to the start of the next; it doubles with each death."""
STEADY = 60.0
"""Seconds after which a gateway's death is no longer counted together with those before."""
_CHUNK, _TAIL = 64 << 10, 16 << 10


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a backend listens for other machines.

    Attributes:
        address: the address.
        certificates: the folder of the server's certificate.
    """

    address: Address
    certificates: Path


@dataclass(kw_only=True)
class _Running:
    """A gateway's process, a descriptor that becomes readable when it exits, and its output."""

    process: subprocess.Popen[bytes]
    pidfd: int
    output: int
    since: float = field(default_factory=time.monotonic)
    tail: bytearray = field(default_factory=bytearray)
    unfinished: bytes = b""


class GatewayProcess:
    """The gateway of one supervisor.

    Args:
        listening: its address and certificates.
        endpoint: the supervisor's.
        logs: take its output.
        events: the supervisor's event loop.

    Raises:
        InvalidRequest: nothing can listen there.
    """

    def __init__(self, *, listening: Listening, endpoint: Endpoint, logs: LogFiles, events: EventLoop) -> None:
        self._listening, self._endpoint, self._logs, self._events = listening, endpoint, logs, events
        self._socket = listen_on(listening.address, backlog=BACKLOG)
        self._running: _Running | None = None
        self._deaths, self._next_start, self._ending = 0, 0.0, False
        self.address = bound_to(self._socket)

    @property
    def pid(self) -> int:
        """Its process id, 0 while it does not run."""
        return self._running.process.pid if self._running else 0

    def __str__(self) -> str:
        return str(self.address) if self._running else f"{self.address}, whose gateway is starting again"

    def tick(self) -> None:
        """Start it if it does not run."""
        if self._running is None and not self._ending and time.monotonic() >= self._next_start:
            self._start()

    def end(self) -> None:
        """Let it accept nothing more. It exits once the supervisor has closed the open connections."""
        self._ending = True
        self._socket.close()
        if self._running is not None:
            processes.send_signal(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        if self._running is not None:
            self._running.process.kill()

    def wait(self, seconds: float) -> None:
        """Let it pass on the last bytes, but not for long."""
        overdue = time.monotonic() + seconds
        while self._running is not None:
            if time.monotonic() > overdue:
                self.kill()
            self._events.run_once(TICK)

    def _start(self) -> None:
        command = [sys.executable, "-m", "parallel_backend.machines.gateway", "--listen-fd", str(self._socket.fileno())]
        command += ["--supervisor", str(self._endpoint.socket), "--certificates", str(self._listening.certificates)]
        output, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(output, False)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                pass_fds=[self._socket.fileno()],
                # Safe: the other thread here only writes logs.
                preexec_fn=processes.die_with_parent,
            )
            pidfd = _watched(process)
        except OSError as error:
            os.close(output)
            self._postpone(f"the gateway does not start: {error}")
            return
        finally:
            os.close(theirs)
        running = self._running = _Running(process=process, pidfd=pidfd, output=output)
        self._events.watch(output, READ, lambda: self._read(running), discard=lambda _: self.kill())
        self._events.watch(pidfd, READ, lambda: self._reap(running), discard=lambda _: self.kill())
        log.info("listening at %s, gateway pid %d", self.address, self.pid)
        if self.address.host in UNSPECIFIED:
            log.warning("%s: EVERY network of this machine reaches the gateway; name one address instead", self.address)

    def _read(self, running: _Running) -> int:
        """Take what has arrived, up to a limit; return the number of bytes."""
        try:
            chunk = os.read(running.output, _CHUNK) if running.output >= 0 else b""
        except BlockingIOError:
            return 0
        if not chunk:
            self._close_output(running)
        running.tail += chunk
        del running.tail[:-_TAIL]
        *lines, running.unfinished = (running.unfinished + chunk).split(b"\n")
        if len(running.unfinished) > MAX_LINE or (running.unfinished and not chunk):
            lines, running.unfinished = [*lines, running.unfinished], b""
        for line in lines:
            self._logs.write(GATEWAY_LOG, line.decode(errors="replace"))
        return len(chunk)

    def _close_output(self, running: _Running) -> None:
        if running.output >= 0:
            self._events.forget(running.output)
            os.close(running.output)
            running.output = -1

    def _reap(self, running: _Running) -> None:
        """The process has exited."""
        while self._read(running):
            pass
        self._close_output(running)
        self._events.forget(running.pidfd)
        os.close(running.pidfd)
        how = processes.describe_exit(running.process.wait(timeout=5))
        self._running = None
        if self._ending:
            return
        if time.monotonic() - running.since > STEADY:
            self._deaths = 0
        reason = last_words.last_line(running.tail.decode(errors="replace"))
        self._postpone(f"the gateway (pid {running.process.pid}) {how}{': ' + reason if reason else ''}")

    def _postpone(self, message: str) -> None:
        delay = min(MAX_DELAY, 0.25 * 2.0**self._deaths)
        self._deaths += 1
        self._next_start = time.monotonic() + delay
        log.warning("%s (log: %s); it starts again in %g s", message, self._endpoint.logs / GATEWAY_LOG, delay)


def _watched(process: "subprocess.Popen[bytes]") -> int:
    """Return a descriptor that becomes readable when a process exits; kill the process if there is none."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
