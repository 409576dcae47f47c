"""Weights in a machine's memory, once for all of its ranks that use them.

The memory is a nameless file (memfd_create(2)), which ends with the last process that uses it. On machines with GPUs
each rank registers it with CUDA, so that copies to its device run beside its work.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..distributed.collectives import gather_numbers, refused_alike
from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..progress import PROGRESS

log = logging.getLogger(__name__)

_DIGEST = 32
EMPTY, BROKEN = bytes(_DIGEST), b"\xff" * _DIGEST
"""What a store that nothing was written to holds, and one in which writing failed."""
_FILL_SECONDS = 3600.0
"""Seconds in which a rank reads what it shares. The supervisor ends it earlier if it stops making progress."""
_INTERVAL = 0.02
"""Seconds between two looks at whether another rank has filled the memory."""


class CpuStore:
    """Shared memory: one rank of a machine creates it, the others map it. Whoever first needs new contents writes them.

    Args:
        descriptor: of the file, which the store closes at its end.
        nbytes: size of the memory.
        device: where it is copied to.
        made_here: whether this rank has made the memory.

    Attributes:
        data: ``[nbytes]`` uint8.
    """

    def __init__(self, descriptor: int, nbytes: int, device: torch.device, *, made_here: bool = True) -> None:
        self.descriptor, self.made_here = descriptor, made_here
        self._mapped = mmap.mmap(descriptor, nbytes + mmap.PAGESIZE)  # the last page is for state
        whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.data, self._state = whole[:nbytes], memoryview(self._mapped)[nbytes:]
        registered = device.type == "cuda" and _register(self.data, device)
        weakref.finalize(self, _release, descriptor, device, self.data.data_ptr() if registered else None)

    @property
    def contents(self) -> bytes:
        """What the memory holds: ``EMPTY``, ``BROKEN`` after an error, or what ``contents_of`` returns."""
        return bytes(self._state[:_DIGEST])

    @property
    def version(self) -> int:
        """How often the contents have been changed."""
        return int.from_bytes(self._state[_DIGEST : _DIGEST + 8], "little")

    def fill(self, work: Callable[[], None]) -> None:
        """Let ``work`` write the weights of the files unless a rank has done so; wait while another one does it.

        Raises:
            TimeoutError: another rank does not finish.
        """
        if self.contents == EMPTY:
            with self._locked():
                if self.contents == EMPTY:
                    work()
                    self._hold(contents_of(""))

    def change(self, key: str, work: Callable[[bytes], None]) -> None:
        """Let ``work`` write other contents unless a rank has done so; wait while another one does it.

        Args:
            key: names the contents; "" means the weights of the files.
            work: writes them. It is given what the memory held before.

        Raises:
            TimeoutError: another rank does not finish.
        """
        wanted = contents_of(key)
        if self.contents != wanted:
            with self._locked():
                before = self.contents
                if before != wanted:
                    self._hold(BROKEN)
                    work(before)
                    self._hold(wanted)

    def _hold(self, contents: bytes) -> None:
        self._state[_DIGEST : _DIGEST + 8] = (self.version + 1).to_bytes(8, "little")
        self._state[:_DIGEST] = contents

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with PROGRESS.waiting():
            self._lock()
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _lock(self) -> None:
        deadline = time.monotonic() + _FILL_SECONDS
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > deadline:
                raise TimeoutError("another rank did not finish reading the weights that the ranks share")
            time.sleep(_INTERVAL)


def contents_of(key: str) -> bytes:
    """Return what a store holds after ``change`` with this key."""
    return hashlib.sha256(key.encode()).digest()


@cache
def machine_number() -> int:
    """Return a number that two processes share if they can map each other's memory: machine and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return (int(boot, 16) ^ os.stat("/proc/self/ns/pid").st_ino) % (1 << 62)


def share(nbytes: int, part: int, device: torch.device, axis: Axis) -> CpuStore | None:
    """Return memory of this size, the same for all ranks of a machine that give the same ``part``. Collective.

    Args:
        nbytes: size of the memory; 0 for a rank that needs none.
        part: what is to be in it.
        device: where it is copied to.
        axis: the ranks that take part.

    Raises:
        InvalidRequest: a rank cannot map another's memory.
    """
    keys: list[Hashable] = list(gather_numbers([machine_number(), part, nbytes], axis))
    owner = keys.index(keys[axis.index])
    descriptor = _create(nbytes) if owner == axis.index and nbytes else -1
    handles = gather_numbers([os.getpid(), descriptor], axis)
    try:
        with refused_alike(axis):
            if nbytes and owner != axis.index:
                descriptor = _open(*handles[owner])
    except InvalidRequest:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    return CpuStore(descriptor, nbytes, device, made_here=owner == axis.index) if nbytes else None


def _create(nbytes: int) -> int:
    descriptor = os.memfd_create("parallel-dit-weights")
    os.ftruncate(descriptor, nbytes + mmap.PAGESIZE)
    return descriptor


def _open(pid: int, descriptor: int) -> int:
    """Return a descriptor of another process's file."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(
            f"blocks cannot stream from the machine's memory, since this rank cannot map that of process {pid} "
            f"({error.strerror}): {_INSTEAD}"
        ) from error


_INSTEAD = "choose a layout whose weights fit on the devices, with tensor, pipe or shard_weights of Parallel Layout"


def _register(data: Tensor, device: torch.device) -> bool:
    """Register memory with CUDA. Without it, copies wait for each other and for the device's work."""
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(error) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel would be blamed for it
        torch.zeros(1, device=device)
    log.warning("CUDA cannot register %.1f GB of memory (%s): weights stream slowly", data.numel() / 1e9, error)
    return False


def _release(descriptor: int, device: torch.device, registered: int | None) -> None:
    if registered is not None:
        torch.cuda.synchronize(device)  # a copy may still read
        with torch.cuda.device(device):  # any thread may run this
            torch.cuda.cudart().cudaHostUnregister(registered)
    os.close(descriptor)
