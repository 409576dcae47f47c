"""Several hosts on one machine: Linux network namespaces, joined by a bridge in a namespace of its own.

Nothing of the machine's own network changes: every interface is made inside a namespace, nothing forwards between them
and the machine, and no host has a route to anything but the others.
"""

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts import processes

from . import hosts
from .hosts import Host, tool

PREFIX = "machines"
FOLDERS = Path("/var/tmp")
"""Not /tmp, which ``own`` may hide, and a short path, because that of a socket may have only 107 characters."""

TOOLS = ("ip", "tc", "ss", "nsenter", "unshare", "mount", "hostname")
MADE_BY = re.compile(rf"{PREFIX}-(?P<pid>\d+)-\d+-.+")

_serial = itertools.count()


@functools.cache
def available() -> str:
    """Why this machine cannot have such a network, or an empty string."""
    if platform.system() != "Linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, mount, hostname)"
    try:
        return _refusal("ip link add link1 type veth peer name link2 && ip link add switch type bridge")
    except subprocess.TimeoutExpired:
        return "namespaces do not answer"


@functools.cache
def can_shape() -> str:
    """Why ``rate`` does not work on this machine, or an empty string."""
    return _refusal("ip link add link1 type veth && tc qdisc add dev link1 root tbf rate 1mbit burst 16kb latency 50ms")


def _refusal(script: str) -> str:
    """What a script in namespaces that end with it says when it fails, or an empty string."""
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", f"mount -t sysfs sysfs /sys && {script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=hosts.TOOL_SECONDS)
    return f"the kernel refuses: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def network(names: Sequence[str], rate: str | None = None, own: Sequence[str] = ()) -> Iterator[tuple[Host, ...]]:
    """Hosts with these names that reach each other. In the end, their processes are killed and all is removed.

    Args:
        names: one for each host, which is also what it is called; each finds all others by name.
        rate: what each host can send ("200mbit"), shaped by a token bucket.
        own: existing folders of the machine, such as "/tmp", of which each host shall have its own, empty at first.

    Raises:
        RuntimeError: a process, a namespace or an interface is left.
    """
    _remove_abandoned()
    network_name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    subnet = _free_subnet()
    folder = Path(tempfile.mkdtemp(prefix=f"{network_name}-", dir=FOLDERS))
    folder.chmod(0o755)
    (folder / "here").mkdir()
    planned = tuple(
        Host(
            name=name,
            namespace=f"{network_name}-{name}",
            address=str(subnet[number]),
            interface=f"link{number}",
            network=network_name,
            switch=f"{network_name}-switch",
            folder=folder / str(number),
            own=tuple(sorted(own)),
        )
        for number, name in enumerate(names, start=1)
    )
    try:
        _make_switch(f"{network_name}-switch")
        for host in planned:
            _make_folder(host, planned)
            _make_host(host, rate)
        yield planned
    finally:
        _remove(network_name, planned, folder)
    if left := leftovers(network_name):
        raise RuntimeError(f"the network {network_name} left {left}")


def leftovers(network_name: str) -> list[str]:
    """Namespaces and processes that belong to a network. Its interfaces have never been outside its namespaces."""
    namespaces = [name for name in _namespaces() if name.startswith(f"{network_name}-")]
    living = processes.find(hosts.MARK, lambda value: value == network_name)
    return [*namespaces, *processes.describe(living).splitlines()]


def _make_switch(switch: str) -> None:
    tool("ip", "netns", "add", switch)
    tool("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    tool("ip", "-n", switch, "link", "set", "switch", "up")


def _make_host(host: Host, rate: str | None) -> None:
    tool("ip", "netns", "add", host.namespace)
    peer = ("peer", "name", host.interface, "netns", host.switch)
    tool("ip", "link", "add", host.interface, "netns", host.namespace, "type", "veth", *peer)
    tool("ip", "-n", host.switch, "link", "set", host.interface, "master", "switch", "up")
    tool("ip", "-n", host.namespace, "link", "set", "lo", "up")
    tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
    tool("ip", "-n", host.namespace, "link", "set", host.interface, "up")
    if rate:
        bucket = ("tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
        tool("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", *bucket)


def _make_folder(host: Host, all_hosts: Sequence[Host]) -> None:
    for name in ("home", "run", "logs", "shm", "cgroup"):
        (host.folder / name).mkdir(parents=True)
    (host.folder / "run").chmod(0o700)
    for own in host.own:
        host.outside(own).mkdir(parents=True)
        shutil.copymode(own, host.outside(own))
    for outer, inner in itertools.permutations(host.own, 2):
        if Path(inner).is_relative_to(outer):  # the outer one hides the machine's, so it needs the place to mount
            (host.outside(outer) / Path(inner).relative_to(outer)).mkdir(parents=True, exist_ok=True)
    names = [f"{other.address} {other.name}" for other in all_hosts]
    (host.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))
    (host.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")


def _free_subnet() -> ipaddress.IPv4Network:
    """A /24 of 10.0.0.0/8 that overlaps no route of the machine, but a default one."""
    routes = [route["dst"] for route in json.loads(tool("ip", "-j", "-4", "route"))]
    used = [ipaddress.IPv4Network(route) for route in routes if route != "default"]
    candidates = ipaddress.IPv4Network("10.64.0.0/10").subnets(new_prefix=24)
    return next(subnet for subnet in candidates if not any(subnet.overlaps(other) for other in used))


def _namespaces() -> list[str]:
    return [entry["name"] for entry in json.loads(tool("ip", "-j", "netns", "list") or "[]")]


def _remove(network_name: str, planned: Sequence[Host], folder: Path) -> None:
    """Remove what was made of a network, however far that came. A veth goes with either namespace."""
    with contextlib.ExitStack() as stack:  # runs all of these, the last one first, and raises an error in the end
        stack.callback(shutil.rmtree, folder)
        for host in planned:
            stack.callback(hosts.reap, host)
        for namespace in _namespaces():
            if namespace.startswith(f"{network_name}-"):
                stack.callback(tool, "ip", "netns", "delete", namespace)
                stack.callback(hosts.kill_namespace, namespace)


def _remove_abandoned() -> None:
    """Remove what test runs left that were killed themselves."""
    for namespace in filter(_is_abandoned, _namespaces()):
        hosts.kill_namespace(namespace)
        tool("ip", "netns", "delete", namespace)
    for folder in FOLDERS.glob(f"{PREFIX}-*"):
        if _is_abandoned(folder.name):
            shutil.rmtree(folder)


def _is_abandoned(name: str) -> bool:
    match = MADE_BY.fullmatch(name)
    return match is not None and not Path("/proc", match["pid"]).exists()
