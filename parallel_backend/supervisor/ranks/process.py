"""A supervisor's view of a rank's process, on this host or another."""

import subprocess
from typing import Protocol

from ... import processes
from ...processes import Activity


class Process(Protocol):
    """A process started here, or by an agent on another host."""

    @property
    def pid(self) -> int:
        """Its process id on its host."""

    @property
    def host(self) -> str:
        """The name of its host; "" for this one."""

    was_spare: bool
    """Whether it waited to be made a rank."""

    @property
    def returncode(self) -> int | None:
        """See ``Popen.returncode``."""

    def poll(self) -> int | None:
        """See ``Popen.poll``."""

    def wait(self, timeout: float) -> int:
        """See ``Popen.wait``."""

    def kill(self) -> None:
        """Have the process killed; ``returncode`` tells when it is gone."""

    def memory(self) -> int:
        """Resident bytes, as far as known; 0 once it is gone."""

    def activity(self) -> Activity | None:
        """Its activity, as far as known; None once it is gone."""

    def describe_exit(self) -> str:
        """How it has ended, as a sentence's predicate."""


class LocalProcess:
    """A child of this process.

    Attributes:
        host: "", which means this host.
        was_spare: whether it waited to be made a rank.
    """

    host = ""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.was_spare = False
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """See ``Popen.returncode``."""
        return self._process.returncode

    def poll(self) -> int | None:
        """See ``Popen.poll``."""
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        """See ``Popen.wait``."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """See ``Popen.kill``."""
        self._process.kill()

    def memory(self) -> int:
        """Resident bytes, 0 once it is gone."""
        return processes.resident_memory(self.pid)

    def activity(self) -> Activity | None:
        """Its activity, None once it is gone."""
        return processes.activity(self.pid)

    def describe_exit(self) -> str:
        """How it has ended, as a sentence's predicate."""
        return processes.describe_exit(self._process.returncode)
