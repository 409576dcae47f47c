"""The process of one rank as its supervisor sees it, and whether it hangs."""

import math
import socket
import time
from dataclasses import dataclass, field, replace

from ...protocol.status import RankStatus
from ..limits import Patience
from .process import Process


@dataclass(kw_only=True)
class RankProcess:
    """One rank.

    Attributes:
        rank: its number.
        process: its process.
        control: the supervisor's end of the control socket.
        pidfd: becomes readable when the process exits.
        status: its last status.
        ready: whether it has joined the process group.
        last_heard: when its last message arrived.
        last_active: when the process was last active since then.
        cpu_ticks: its CPU time at the last check since its last message, None before that check.
        last_progress: when it was last known to make progress.
        last_computing: when a process without a GPU last reported that it uses its cores.
    """

    rank: int
    process: Process
    control: socket.socket
    pidfd: int
    status: RankStatus
    ready: bool = False
    last_heard: float = field(default_factory=time.monotonic)
    last_active: float = 0.0
    cpu_ticks: int | None = None
    last_progress: float = field(default_factory=time.monotonic)
    last_computing: float = -math.inf

    @property
    def name(self) -> str:
        """Its name in error messages."""
        where = f" on {self.process.host}" if self.process.host else ""
        return f"rank {self.rank} (pid {self.process.pid}{where})"

    def heard(self) -> None:
        """Note that a message has arrived from the rank."""
        self.last_heard, self.cpu_ticks = time.monotonic(), None

    def report(self, status: RankStatus) -> None:
        """Note a status that has just arrived from the rank."""
        self.status = replace(status, pid=self.process.pid, host=self.process.host)
        self.last_progress = max(self.last_progress, self.last_heard - status.progress.quiet)
        if status.progress.computing and status.device == "cpu":  # the host of a GPU may wait for it in a loop
            self.last_computing = self.last_heard

    def discount(self, seconds: float, now: float) -> None:
        """Do not count the last ``seconds`` of silence until ``now``: the supervisor itself was suspended."""
        self.last_heard, self.cpu_ticks = min(now, self.last_heard + seconds), None
        self.last_progress = min(now, self.last_progress + seconds)

    def is_hung(self, patience: Patience, now: float) -> bool:
        """Whether the rank has been silent for too long, given what its process is doing."""
        silence = now - self.last_heard
        if not self.ready or silence < patience.hang / 4:
            return False
        activity = self.process.activity()
        if activity and (activity.cpu_ticks != self.cpu_ticks or activity.busy):
            # The first check has no earlier CPU time to compare with, so only a busy process counts as active.
            self.last_active = self.last_heard if self.cpu_ticks is None and not activity.busy else now
            self.cpu_ticks = activity.cpu_ticks
        inactivity = now - max(self.last_heard, self.last_active)
        return inactivity > patience.hang or silence > patience.stall
