"""One rank's process on this host. Reports everything to the supervisor on the first host."""

import codecs
import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from ... import processes
from ...protocol import rank_control
from ...supervisor.event_loop import READ, EventLoop
from ...supervisor.ranks.rank_start import StartedProcess
from . import host_control

_CHUNK = 32 << 10
"""Bytes of one message, which JSON may make six times as long."""
_LAST = 1 << 20
"""Bytes that are read at most when the process has ended: as many as a pipe may hold."""


class HostedRank:
    """A rank's process.

    Args:
        key: identifies it in messages.
        start: starts it with a descriptor for its output.
        events: the agent's event loop.
        send: sends a message to the supervisor.

    Attributes:
        started: its process.
        exited: whether it has exited, and the supervisor has been told.

    Raises:
        OSError: it does not start.
    """

    def __init__(
        self,
        *,
        key: int,
        start: Callable[[int], StartedProcess],
        events: EventLoop,
        send: Callable[[host_control.FromHost], None],
    ) -> None:
        self._key, self._events, self._send, self.exited = key, events, send, False
        self._paused = self._silent = False
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._output, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        try:
            self.started = start(write_end)
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)
        for descriptor, read in (
            (self._output, self._read_output),
            (self.started.control.fileno(), self._read_message),
            (self.started.pidfd, self._reap),
        ):
            events.watch(descriptor, READ, read, discard=lambda error: self.kill())
        process = self.started.process
        send(host_control.RankStarted(key=key, pid=process.pid, was_spare=process.was_spare))

    def kill(self) -> None:
        """Kill it, if it has not exited."""
        if self.started.process.returncode is None:
            self.started.process.kill()

    def activity(self) -> host_control.RankActivity | None:
        """Its process's activity, None once it is gone."""
        activity = self.started.process.activity()
        if activity is None:
            return None
        memory = processes.resident_memory(self.started.process.pid)
        return host_control.RankActivity(memory=memory, cpu_ticks=activity.cpu_ticks, busy=activity.busy)

    def _read_output(self) -> int:
        try:
            chunk = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return 0
        self._pass_on(chunk)
        if not chunk:
            self._silent = True
            self._events.forget(self._output)
        return len(chunk)

    def _pass_on(self, chunk: bytes, *, last: bool = False) -> None:
        if text := self._text.decode(chunk, final=last):  # a character may go on in the next chunk
            self._send(host_control.RankWrote(key=self._key, text=text))

    def _read_message(self) -> int:
        try:
            message = self.started.control.recv(rank_control.MAX_DATAGRAM, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            message = b""
        if message:
            self._send(host_control.RankSaid(key=self._key, message=_checked(message)))
        else:
            self._events.forget(self.started.control.fileno())
        return len(message)

    def pause_output(self, paused: bool) -> None:
        """Stop reading the process's output, or read it again."""
        if paused != self._paused and not (self.exited or self._silent):
            self._paused = paused
            if paused:
                self._events.forget(self._output)
            else:
                self._events.watch(self._output, READ, self._read_output, discard=lambda error: self.kill())

    def _reap(self) -> None:
        """The process has exited: pass on its last messages, and then how it ended."""
        returncode = self.started.process.wait(timeout=5.0)
        taken = 0
        while taken < _LAST and (count := self._read_output() + self._read_message()):
            taken += count
        self._pass_on(b"", last=True)
        self._close()
        self._send(host_control.RankExited(key=self._key, returncode=returncode))

    def _close(self) -> None:
        self.exited = True
        for descriptor in (self._output, self.started.control.fileno(), self.started.pidfd):
            self._events.forget(descriptor)
        self.started.control.close()
        for descriptor in (self._output, self.started.pidfd):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _checked(message: bytes) -> msgspec.Raw:
    """Return a rank's message, or JSON that the supervisor rejects: that ends the rank set, not the host."""
    try:
        msgspec.json.decode(message, type=msgspec.Raw)
        return msgspec.Raw(message)
    except (ValueError, RecursionError):
        return msgspec.Raw(b'"no JSON"')
