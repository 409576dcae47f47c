"""A host of a test network: its processes and listening sockets, and its link.

A host is a network namespace. Each of its processes also gets a mount namespace and a UTS namespace, in which it finds
the host's own ``/etc/hosts``, ``/dev/shm``, ``/sys`` and boot id, and the host's name. Process ids, users and all other
files are the machine's, unless the network was asked for more.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.processes import wait_until

MARK = "PARALLEL_DIT_TEST_NETWORK"
"""Environment variable that names the network whose host started a process."""

KILL_SECONDS = 20.0
TOOL_SECONDS = 30.0

# ss also prints an interface ("%link1") with some addresses.
LISTENER = re.compile(r"^LISTEN\s+\d+\s+\d+\s+\[?(?P<address>[^\s%\]]+?)(%\w+)?\]?(%\w+)?:(?P<port>\d+)\s")


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A listening TCP socket of one process. ``*`` is every address of both IP versions."""

    address: str
    port: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: its name, its network namespace, and its address at its only interface beside ``lo``."""

    name: str
    namespace: str
    address: str
    interface: str
    network: str
    """What ``MARK`` is set to in its processes."""
    switch: str
    """The namespace of the bridge, whose port of this host has the name of ``interface``."""
    folder: Path
    """Its home, runtime folder and logs, and what its processes have mounted."""
    own: tuple[str, ...] = ()
    """Sorted folders of the machine for which this host has its own, empty at first: see ``outside``."""
    started: list["subprocess.Popen[str]"] = field(default_factory=list, compare=False, repr=False)

    def outside(self, own: str) -> Path:
        """Where the machine, and thus a test, finds the host's own version of a folder in ``own``."""
        return self.folder / "own" / own.strip("/").replace("/", "-")

    @property
    def here(self) -> Path:
        """A path that is the same on all hosts of a network, where each of them finds its own ``folder``."""
        return self.folder.parent / "here"

    def environment(self) -> dict[str, str]:
        """The variables that differ between hosts."""
        return {
            MARK: self.network,
            "HOME": str(self.folder / "home"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "PARALLEL_DIT_RUNTIME": str(self.folder / "run" / "parallel_dit"),
            "PARALLEL_DIT_LOGS": str(self.folder / "logs"),
        }

    def popen(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        output: IO[Any] | int | None = subprocess.PIPE,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start a command on this host. Its pid is that of the command itself, which leads a session of its own.

        Standard output and standard error both go to ``output``; a test that does not read it gives it a file.
        """
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        process = subprocess.Popen(
            [*enter, "sh", "-c", self._prelude(), "sh", *map(str, command)],
            env={**os.environ, **self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        self.started.append(process)
        return process

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on this host to its end and return its status and output; ``TimeoutExpired`` kills it."""
        process = self.popen(command, env)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            process.kill()
            output, _ = process.communicate(timeout=KILL_SECONDS)
            raise subprocess.TimeoutExpired(command, seconds, output) from error
        return subprocess.CompletedProcess(command, process.returncode, output)

    def _prelude(self) -> str:
        folder, lines = self.folder, ["set -e"]
        for kind in ("mnt", "uts"):  # whatever went wrong before, the machine itself keeps its name and its mounts
            machine = os.readlink(f"/proc/self/ns/{kind}")
            lines.append(f'[ "$(readlink /proc/self/ns/{kind})" != "{machine}" ]')
        lines.append(f"hostname {shlex.quote(self.name)}")

        def bind(inner: Path, place: str) -> None:
            lines.append(f"mount --bind {shlex.quote(str(inner))} {shlex.quote(place)}")

        # A new sysfs shows the namespace's interfaces, but would hide the control groups.
        lines.append(f"mount --rbind /sys/fs/cgroup {shlex.quote(str(folder / 'cgroup'))}")
        lines.append("mount -t sysfs sysfs /sys")
        lines.append(f"mount --move {shlex.quote(str(folder / 'cgroup'))} /sys/fs/cgroup")
        bind(folder, str(self.here))
        bind(folder / "hosts", "/etc/hosts")
        bind(folder / "shm", "/dev/shm")
        bind(folder / "boot_id", "/proc/sys/kernel/random/boot_id")
        for own in self.own:
            bind(self.outside(own), own)
        return "\n".join([*lines, 'exec "$@"'])


def tool(*command: str) -> str:
    """Output of a command that must succeed at once; its error output is in the exception."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def link_down(host: Host) -> None:
    """Pull the host's cable at the switch: its interface stays up without carrier, and what it sends is lost."""
    tool("ip", "-n", host.switch, "link", "set", host.interface, "down")


def link_up(host: Host) -> None:
    """Plug the host's cable in again, and wait until both ends know it."""
    tool("ip", "-n", host.switch, "link", "set", host.interface, "up")

    def connected() -> bool:
        ends = (host.switch, host.namespace)
        states = [json.loads(tool("ip", "-n", end, "-j", "link", "show", "dev", host.interface)) for end in ends]
        return all(link["operstate"] == "UP" for (link,) in states)

    wait_until(connected, TOOL_SECONDS, f"{host.name} has a carrier")


def sent_bytes(host: Host) -> int:
    """Bytes that the host has sent over its link, headers included."""
    (link,) = json.loads(tool("ip", "-n", host.namespace, "-s", "-j", "link", "show", "dev", host.interface))
    return int(link["stats64"]["tx"]["bytes"])


def listeners(host: Host) -> list[Listener]:
    """Every listening TCP socket of the host, once for each process that has it open."""
    found = []
    for line in tool("nsenter", f"--net=/run/netns/{host.namespace}", "ss", "-ltnpH").splitlines():
        match = LISTENER.match(line)
        if match is None:
            raise RuntimeError(f"ss printed a line of an unknown form: {line!r}")
        for pid in re.findall(r"pid=(\d+)", line):
            found.append(Listener(address=match["address"], port=int(match["port"]), pid=int(pid)))
    return found


def pids(host: Host) -> list[int]:
    """Every live process of the host, also those that left their parent, their session or their environment."""
    return [int(pid) for pid in tool("ip", "netns", "pids", host.namespace).split()]


def kill_all(host: Host) -> None:
    """Kill every process of the host, as a power cut does, and wait until none is left."""
    kill_namespace(host.namespace)
    reap(host)


def kill_namespace(namespace: str) -> None:
    """Kill every process of a network namespace, and wait until none is left."""

    def killed() -> bool:
        living = [int(pid) for pid in tool("ip", "netns", "pids", namespace).split()]
        for pid in living:  # one may start another before its own turn comes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not living

    wait_until(killed, KILL_SECONDS, f"no process of {namespace} is left")


def reap(host: Host) -> None:
    """Take the exit status of every process that ``popen`` started, all of which have ended."""
    for process in host.started:
        process.wait(KILL_SECONDS)
        if process.stdout:
            process.stdout.close()
    host.started.clear()
