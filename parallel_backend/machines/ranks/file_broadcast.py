"""Sends a file from rank 0 to one rank of each host, which keeps it in memory for the ranks of its host."""

import mmap
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ...distributed.collectives import gather_numbers, refused_alike
from ...distributed.mesh import Axis
from ...errors import InvalidRequest
from ...progress import PROGRESS

CHUNK = 16 << 20
"""Bytes of one broadcast."""


class FilesInMemory:
    """The files that this rank keeps for its host; see memfd_create(2)."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def new(self) -> int:
        """Make an empty file, and return its descriptor."""
        descriptor = os.memfd_create("parallel-dit", os.MFD_CLOEXEC)
        self._descriptors[path_of(os.getpid(), descriptor)] = descriptor
        return descriptor

    def new_of(self, size: int) -> tuple[str, memoryview]:
        """Make a file of ``size`` bytes, and return its path and memory for its content.

        Raises:
            InvalidRequest: there is no room for it.
        """
        descriptor = self.new()
        path = path_of(os.getpid(), descriptor)
        try:
            os.posix_fallocate(descriptor, 0, max(1, size))
            os.ftruncate(descriptor, size)
            return path, memoryview(mmap.mmap(descriptor, size) if size else bytearray())
        except OSError as error:
            self.close(path)
            raise InvalidRequest(f"a file of {size} bytes does not fit into memory: {error.strerror}") from error

    def descriptor(self, path: str) -> int:
        """Return the descriptor of the file at a path, if this rank keeps it, otherwise -1."""
        return self._descriptors.get(path, -1)

    def close(self, path: str) -> None:
        """Give the file at this path up, if this rank keeps it."""
        if path in self._descriptors:
            os.close(self._descriptors.pop(path))


def path_of(pid: int, descriptor: int) -> str:
    """Return the path by which processes of this host open a file that one of them keeps open."""
    return f"/proc/{pid}/fd/{descriptor}"


def broadcast_file(path: Path, world: Axis, into: int) -> None:
    """Send a file of rank 0 to all ranks. Collective.

    Args:
        path: the file, for rank 0.
        world: all ranks.
        into: a descriptor that this rank writes it to, or -1.

    Raises:
        InvalidRequest: rank 0 cannot read it; on all ranks alike.
    """
    content = np.empty(0, np.uint8)
    with refused_alike(world):
        if world.index == 0:
            content = _mapped(path)
    size = gather_numbers([len(content)], world)[0][0] if world.size > 1 else 0
    for start in range(0, size, CHUNK):
        chunk = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
        if world.index == 0:
            chunk.copy_(torch.from_numpy(np.array(content[start : start + CHUNK])))
        with PROGRESS.waiting():
            dist.broadcast(chunk, world.ranks[0], group=world.group)
        PROGRESS.tick()
        if into >= 0:
            _write(into, memoryview(chunk.numpy().tobytes()))


def _mapped(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
