"""The process of one rank as its supervisor sees it, and whether it hangs."""

import socket
import subprocess
import time
from dataclasses import dataclass, field

from .. import processes
from ..protocol.status import RankStatus
from .limits import Patience


@dataclass(kw_only=True)
class RankProcess:
    """One rank.

    Attributes:
        rank: its number.
        process: its process.
        control: the supervisor's end of the control socket.
        pidfd: becomes readable when the process exits.
        status: the last one that the rank sent.
        ready: whether it has joined the process group.
        last_heard: when its last message arrived.
        last_active: when the process was last seen active since then.
        cpu_ticks: its CPU time at the last check since its last message, None before that check.
    """

    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    pidfd: int
    status: RankStatus
    ready: bool = False
    last_heard: float = field(default_factory=time.monotonic)
    last_active: float = 0.0
    cpu_ticks: int | None = None

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"rank {self.rank} (pid {self.process.pid})"

    def heard(self) -> None:
        """Note that a message has arrived from the rank."""
        self.last_heard, self.cpu_ticks = time.monotonic(), None

    def discount(self, seconds: float, now: float) -> None:
        """Do not count ``seconds`` of silence until ``now``, in which the supervisor itself was suspended."""
        self.last_heard, self.cpu_ticks = min(now, self.last_heard + seconds), None

    def is_hung(self, patience: Patience, now: float) -> bool:
        """Whether the rank has been silent for too long, given what its process is doing."""
        silence = now - self.last_heard
        if not self.ready or silence < patience.hang / 4:
            return False
        activity = processes.activity(self.process.pid)
        if activity and (activity.cpu_ticks != self.cpu_ticks or activity.busy):
            # The first check has no earlier CPU time to compare with, so only a busy process counts as active.
            self.last_active = self.last_heard if self.cpu_ticks is None and not activity.busy else now
            self.cpu_ticks = activity.cpu_ticks
        inactivity = now - max(self.last_heard, self.last_active)
        return inactivity > patience.hang or silence > patience.stall
