"""A rank's process on another host, as its agent reports it."""

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from ... import processes
from ...processes import Activity
from ...protocol import rank_control
from ...supervisor.event_loop import WRITE, EventLoop
from .host_control import RankActivity

LOST = -1000
"""The exit status of a process whose host was lost."""
_MAX_WAITING = 256
"""Messages that may wait for the supervisor, but for heartbeats a rank sends few. One that sends more is killed."""


class RemoteProcess:
    """The process of one rank, see ``ranks.process.Process``.

    Args:
        host: the host's name.
        output: takes its output; this object owns a copy of the descriptor.
        kill: asks the agent to kill it.
        events: the supervisor's event loop.

    Attributes:
        host: the host's name.
        pid: its process id there, 0 until the agent has started it.
        was_spare: whether it waited there to be made a rank.
        returncode: its exit status, ``LOST`` if the host was lost, None while it runs.
        control: the supervisor's end of a socket on which the rank's messages arrive, as from a rank of this host.
        exited: a descriptor that becomes readable when ``returncode`` is set. The caller closes it.
    """

    def __init__(self, *, host: str, output: int, kill: Callable[[], None], events: EventLoop) -> None:
        self.host, self.pid, self.was_spare, self._kill, self._events = host, 0, False, kill, events
        self.returncode: int | None = None
        self.control, self._rank_end = rank_control.pair()
        self._waiting: deque[bytes] = deque()
        self.exited = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._exit_event = os.dup(self.exited)
        self._output = os.dup(output)
        os.set_blocking(self._output, False)
        self._activity: RankActivity | None = None
        self._end = ""

    # What the supervisor asks

    def poll(self) -> int | None:
        """See ``Popen.poll``."""
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit status of a process that has exited."""
        assert self.returncode is not None, "only the event loop waits for processes of other hosts"
        return self.returncode

    def kill(self) -> None:
        """Have the agent kill the process."""
        self._kill()

    def memory(self) -> int:
        """Resident bytes at the last report, 0 once it is gone."""
        return self._activity.memory if self._activity and self.returncode is None else 0

    def activity(self) -> Activity | None:
        """Its activity at the last report, None once it is gone."""
        if self._activity is None or self.returncode is not None:
            return None
        states = frozenset("R" if self._activity.busy else "S")
        return Activity(states=states, cpu_ticks=self._activity.cpu_ticks)

    def describe_exit(self) -> str:
        """How it has ended, as a sentence's predicate."""
        return self._end or processes.describe_exit(self.returncode or 0)

    # What the agent reports

    def started(self, pid: int, *, was_spare: bool) -> None:
        """It runs."""
        self.pid, self.was_spare = pid, was_spare

    def report(self, activity: RankActivity) -> None:
        """Note what it does."""
        self._activity = activity

    def said(self, message: bytes) -> None:
        """The rank has sent a message. It waits if the supervisor does not read in time; only heartbeats are
        dropped."""
        if (not self._waiting and self._sent(message)) or _is_heartbeat(message):
            return
        if not self._waiting:
            self._events.watch(self._rank_end.fileno(), WRITE, self._flush, discard=lambda error: self.kill())
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(message)
        else:
            self.kill()

    def _sent(self, message: bytes) -> bool:
        """Send a message. Return whether there was room; true also if the reader is gone."""
        try:
            self._rank_end.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _flush(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            self._events.forget(self._rank_end.fileno())
            if self.returncode is not None:
                self._tell_of_end()

    def wrote(self, text: str) -> None:
        """The process has written to stdout or stderr. Output is lost while the pipe is full."""
        with contextlib.suppress(OSError):
            os.write(self._output, text.encode())

    def ended(self, returncode: int, how: str = "") -> None:
        """It has exited, or cannot be asked any more.

        Args:
            returncode: see ``Popen.returncode``.
            how: describes the end, where the exit status does not.
        """
        if self.returncode is not None:
            return
        self.returncode, self._end = returncode, how
        os.close(self._output)
        if not self._waiting:
            self._tell_of_end()

    def _tell_of_end(self) -> None:
        self._rank_end.close()
        os.eventfd_write(self._exit_event, 1)
        os.close(self._exit_event)


def _is_heartbeat(message: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(message, type=rank_control.FromRank), rank_control.Heartbeat)
    except (msgspec.MsgspecError, RecursionError):
        return False
