"""A slow network on one machine: one network namespace per rank, a veth pair between them, a token bucket at each end.

Needs root on Linux, and ``ip`` and ``tc`` of iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from parallel_backend.errors import InvalidRequest

RANKS = 2
BURST, LATENCY = "256kb", "200ms"
_ADDRESSES = ("10.251.0.1/30", "10.251.0.2/30")


class Links:
    """A context manager that creates the namespaces and the link, and removes them.

    Attributes:
        namespaces: name of the network namespace, by rank.
        interfaces: name of the network interface, by rank.
    """

    def __init__(self) -> None:
        name = f"pdit{os.getpid()}"
        self.namespaces = [f"{name}n{rank}" for rank in range(RANKS)]
        self.interfaces = [f"pd{os.getpid() % 100000}v{rank}" for rank in range(RANKS)]

    def __enter__(self) -> "Links":
        check_tools()
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self._remove()

    def prefix(self, rank: int) -> list[str]:
        """The command prefix that runs a process in a rank's namespace."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def limit(self, megabits: float | None) -> None:
        """Limit the link to this many megabits a second in each direction; None removes the limit."""
        for namespace, interface in zip(self.namespaces, self.interfaces, strict=True):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"], capture_output=True)
            if megabits:
                shape = ["tbf", "rate", f"{megabits}mbit", "burst", BURST, "latency", LATENCY]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shape)

    def _create(self) -> None:
        for namespace in self.namespaces:
            _run("ip", "netns", "add", namespace)
        ends = [("netns", namespace) for namespace in self.namespaces]
        _run("ip", "link", "add", self.interfaces[0], *ends[0], "type", "veth", "peer", self.interfaces[1], *ends[1])
        for namespace, interface, address in zip(self.namespaces, self.interfaces, _ADDRESSES, strict=True):
            _run("ip", "-n", namespace, "addr", "add", address, "dev", interface)
            for name in (interface, "lo"):
                _run("ip", "-n", namespace, "link", "set", name, "up")

    def _remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@contextmanager
def slow_loopback(megabits: float) -> Iterator[list[str]]:
    """Make a network namespace whose loopback carries this many megabits a second, of all its processes together.

    Yields:
        The command prefix that runs a process in it.
    """
    check_tools()
    name = f"pdit{os.getpid()}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        shape = ["tbf", "rate", f"{megabits}mbit", "burst", BURST, "latency", LATENCY]
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *shape)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def check_tools() -> None:
    """Refuse where nothing can make a network slow.

    Raises:
        InvalidRequest: it is not root, or a program is missing.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise InvalidRequest("--link creates network namespaces, which needs root, and ip and tc of iproute2")


def _run(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if process.returncode:
        raise InvalidRequest(f"{' '.join(command)} failed: {process.stderr.strip() or process.returncode}")
