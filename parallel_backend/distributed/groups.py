"""Process groups by their ranks: axes and meshes over the same ranks share one, and its last user frees it."""

import os
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ..progress import CONNECTING, PROGRESS
from .process_group import connect, waiting_options

_UNLIMITED = 1 << 30
"""More groups than anyone makes."""
_SPARE_DESCRIPTORS = 4
"""Groups leave 1/N of the process's file descriptors to files and connections."""
_MEMORY_SHARE = 20
"""NCCL's groups take at most 1/N of the device's bytes, so that models that load later find room."""
_FREE_SHARE = 2
"""New groups take at most 1/N of the bytes that are free when they are made."""


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """The purpose of a process group.

    Attributes:
        ranks: its global ranks, in ascending order.
        purpose: "" for the shared group of all work that runs in one order on every rank. Concurrent work has a group
            and a name of its own.
        waits: whether receives are posted long before their tensors are sent.
    """

    ranks: tuple[int, ...]
    purpose: str = ""
    waits: bool = field(default=False, compare=False)


class GroupPool:
    """The groups that are in use. Every rank of the world holds, makes and releases the same ones in the same order.

    The initial group of all ranks serves all work that needs no group of its own, and stays.

    A group's cost is measured when it is made. With gloo, a group of ``n`` ranks takes ``n + 3`` descriptors,
    3 threads and 0.1 MB of each of them, so a process's descriptors (1,024 on many systems) run out first. With NCCL,
    it takes memory of the device.

    Args:
        rank: this rank.
        world_size: number of ranks.
        device: this rank's device.
        timeout: deadline of each collective in a group.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        self._rank, self._world_size, self._device, self._timeout = rank, world_size, device, timeout
        self._users: dict[GroupKey, int] = {}
        self._made: dict[GroupKey, dist.ProcessGroup | None] = {}
        self._descriptors = self._memory = 0

    def group(self, key: GroupKey) -> dist.ProcessGroup | None:
        """Return a group; None on a rank outside of it."""
        return dist.group.WORLD if self._is_world(key) else self._made[key]

    def hold(self, keys: Iterable[GroupKey]) -> list[GroupKey]:
        """Count one more user of each group. Return the groups that have to be made."""
        for key in keys:
            if not self._is_world(key):
                self._users[key] = self._users.get(key, 0) + 1
        return [key for key in self._users if key not in self._made]

    def make(self, keys: Iterable[GroupKey]) -> None:
        """Make groups that are held. Collective over the world, idle ranks included.

        NCCL splits them off the group of all ranks, which must be idle.
        """
        for key in keys:
            before = self._usage()
            with PROGRESS.phase(CONNECTING):
                nccl = "nccl" in dist.get_backend(dist.group.WORLD)
                options = waiting_options() if nccl and key.waits and dist.is_nccl_available() else None
                group = dist.new_group(list(key.ranks), timeout=self._timeout, pg_options=options)
                self._made[key] = group if self._rank in key.ranks else None
                if self._rank in key.ranks and nccl:
                    connect(group)
            descriptors, memory = (after - start for after, start in zip(self._usage(), before, strict=True))
            self._descriptors, self._memory = max(self._descriptors, descriptors), max(self._memory, memory)

    def release(self, keys: Iterable[GroupKey]) -> None:
        """Count one user less of each group, and free unused groups. Collective over the world."""
        for key in keys:
            if self._is_world(key):
                continue
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                group = self._made.pop(key)
                if group is not None:
                    dist.destroy_process_group(group)

    def affordable(self) -> int:
        """How many groups this rank may be in, with its current ones."""
        mine = sum(self._rank in key.ranks for key in self._made)
        return min(self._affordable_descriptors(mine), self._affordable_memory(mine))

    def fit(self, affordable: Sequence[int]) -> bool:
        """Whether each rank can afford all held groups, made or not.

        Args:
            affordable: number of groups, by rank.
        """
        return all(sum(rank in key.ranks for key in self._users) <= most for rank, most in enumerate(affordable))

    def _is_world(self, key: GroupKey) -> bool:
        return not key.purpose and len(key.ranks) == self._world_size

    def _affordable_descriptors(self, mine: int) -> int:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if not self._descriptors or limit == resource.RLIM_INFINITY:
            return _UNLIMITED
        return mine + (limit - limit // _SPARE_DESCRIPTORS - _open_descriptors()) // self._descriptors

    def _affordable_memory(self, mine: int) -> int:
        if not self._memory:
            return _UNLIMITED
        free, total = torch.cuda.mem_get_info(self._device)
        return min(total // _MEMORY_SHARE, mine * self._memory + free // _FREE_SHARE) // self._memory

    def _usage(self) -> tuple[int, int]:
        """Return this process's number of open descriptors, and the device's used bytes."""
        if self._device.type != "cuda":
            return _open_descriptors(), 0
        free, total = torch.cuda.mem_get_info(self._device)
        return _open_descriptors(), total - free


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
