"""A backend over several hosts of a test network: the first host's, agents on the others, and a client on any."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.processes import wait_until

from .hosts import Host

ROOT = Path(__file__).resolve().parents[2]
JOINED_SECONDS = 60.0
PYTHON = sys.executable


@dataclass(kw_only=True)
class Backend:
    """A backend whose processes run on hosts of a test network.

    Attributes:
        hosts: the first host, and those that join it.
        certificates: the folder of all certificates, which all hosts share here.
        env: more variables for all processes.
    """

    hosts: Sequence[Host]
    certificates: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where the first host listens."""
        return f"{self.hosts[0].address}:7400"

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of every process of the backend."""
        return {
            "PARALLEL_DIT_CERTIFICATES": str(self.certificates),
            "PARALLEL_DIT_SPARES": "0",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts' / 'cpu_shim'}",
            "OMP_NUM_THREADS": "1",
            **self.env,
            **variables,
        }

    def command(self, host: Host, *arguments: str, seconds: float = 60.0, **variables: str) -> str:
        """Run ``python -m parallel_backend`` on a host, and return what it prints."""
        done = host.run([PYTHON, "-m", "parallel_backend", *arguments], self.environment(**variables), seconds)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self) -> None:
        """Make certificates, serve on the first host, and have the others join."""
        first = self.hosts[0]
        self.command(first, "certificates", "--hosts", f"{first.address},{first.name}")
        nodes = ["--nnodes", str(len(self.hosts)), "--interface", first.interface] if len(self.hosts) > 1 else []
        listen = [] if nodes else ["--listen", self.address]
        first.popen(
            [PYTHON, "-m", "parallel_backend", "serve", *nodes, *listen], self.environment(),
            output=self.log(first, "serve").open("w"),
        )  # fmt: skip
        for node, host in enumerate(self.hosts[1:], 1):
            self.join(host, node)
        self.wait_for(["joined"] * len(self.hosts))

    def join(self, host: Host, node: int) -> None:
        """Start the agent of a host."""
        host.popen(
            [PYTHON, "-m", "parallel_backend", "host", "--connect", self.address, "--interface", host.interface,
             "--node", str(node)],
            self.environment(), output=self.log(host, "host").open("a"),
        )  # fmt: skip

    def log(self, host: Host, name: str) -> Path:
        """What a process of a host writes to its terminal."""
        folder = host.folder / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.txt"

    def status(self) -> dict[str, Any]:
        """What ``status --json`` says on the first host; empty while nothing answers."""
        done = self.hosts[0].run([PYTHON, "-m", "parallel_backend", "status", "--json"], self.environment())
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def wait_for(self, states: Sequence[str]) -> None:
        """Wait until the hosts have these states."""

        def reached() -> bool:
            return [host["state"] for host in self.status().get("hosts", [])] == list(states)

        wait_until(reached, JOINED_SECONDS, f"the hosts are {', '.join(states)}")

    def stop(self) -> None:
        """Stop the backend; agents go on waiting for another one."""
        self.command(self.hosts[0], "stop")
