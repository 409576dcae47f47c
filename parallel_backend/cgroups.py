"""The memory that control groups leave this process: containers, Slurm jobs and systemd units have limits there.

Reads versions 1 and 2 of the interface (cgroups(7), and the kernel's ``cgroup-v2.rst`` and ``memory.rst``).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SYSTEM = Path("/")


@dataclass(frozen=True, kw_only=True)
class _Interface:
    """Names of a version's files, and of the fields of ``memory.stat`` that count what the kernel can reclaim."""

    mount: str
    limit: str
    used: str
    reclaimable: tuple[bytes, ...]


_V2 = _Interface(
    mount="sys/fs/cgroup", limit="memory.max", used="memory.current", reclaimable=(b"inactive_file", b"active_file")
)
_V1 = _Interface(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    reclaimable=(b"total_inactive_file", b"total_active_file"),
)


@dataclass(frozen=True, kw_only=True)
class LimitedGroup:
    """A control group that this process is in and that limits memory.

    Attributes:
        folder: its files.
        interface: their names.
        limit: bytes that it may use.
    """

    folder: Path
    interface: _Interface
    limit: int

    @property
    def left(self) -> int:
        """Bytes that its processes can still use. The kernel reclaims cached files first."""
        used = int((self.folder / self.interface.used).read_bytes())
        fields = dict(line.split() for line in (self.folder / "memory.stat").read_bytes().splitlines())
        return self.limit - used + sum(int(fields.get(name, 0)) for name in self.interface.reclaimable)


@cache
def limited_groups(system: Path = _SYSTEM) -> tuple[LimitedGroup, ...]:
    """Return the control groups that limit this process's memory, as they are at the first call."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    groups: list[LimitedGroup] = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            groups += _limited(system, _V2, path)
        elif "memory" in controllers.split(","):
            groups += _limited(system, _V1, path)
    return tuple(groups)


def _limited(system: Path, names: _Interface, path: str) -> Iterator[LimitedGroup]:
    """Yield a group and its parents that have limits. A container may see its own group at the root of the mount."""
    mount = system / names.mount
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        with suppress(OSError, ValueError):  # not there, or "max"
            limit = int((folder / names.limit).read_text())
            if limit < _UNLIMITED:
                yield LimitedGroup(folder=folder, interface=names, limit=limit)


_UNLIMITED = 1 << 60
"""Version 1 reports "no limit" as a number this large."""
