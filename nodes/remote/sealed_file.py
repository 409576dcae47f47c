"""Tensors in a safetensors file in memory, which the ranks read.

The file is anonymous (``memfd_create(2)``) and sealed. Ranks open it as ``/proc/<pid>/fd/<number>``, which the kernel
allows to processes of the same user. It takes the CPU's memory once, however many ranks read it.
"""

import fcntl
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.checkpoint.dtypes import PACKED_NAMES, STORED_NAMES
from ...parallel_backend.errors import InvalidRequest

_NAMES = STORED_NAMES | PACKED_NAMES


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The dtype and shape of a tensor of the file. The dtype is one of ``STORED_NAMES`` or ``PACKED_NAMES``."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SealedFile:
    """A file in memory. It lives as long as this object.

    At first it has a header only, and takes no memory. ``fill`` writes the tensors.

    Attributes:
        path: where other processes open it.
        nbytes: bytes of the tensors.
    """

    def __init__(self, slots: Mapping[str, Slot], metadata: Mapping[str, str]) -> None:
        header = _header(slots, metadata)
        self.nbytes = sum(slot.nbytes for slot in slots.values())
        self._start = len(header)
        self._descriptor = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.pwrite(self._descriptor, header, 0)
        os.truncate(self._descriptor, self._start + self.nbytes)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def fill(self, tensors: Iterable[Tensor], what: str = "weights that the ranks read", remedy: str = "") -> None:
        """Write all tensors in the order of the slots, and forbid changes from then on.

        Raises:
            InvalidRequest: the system refuses the memory. Says for ``what``, and the remedy.
        """
        size, created = self._start + self.nbytes, os.fstat(self._descriptor).st_mtime_ns
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise InvalidRequest(
                f"the system gives no {size / 1e9:.1f} GB of memory for {what} ({error}){remedy}"
            ) from error
        position = self._start
        with mmap.mmap(self._descriptor, size) as target:
            for tensor in tensors:
                data = raw_bytes(tensor)
                target[position : position + len(data)] = data
                position += len(data)
        assert position == size, (position, size)
        # A model's stamp, by which the ranks know it, has the time of the last change.
        os.utime(self._descriptor, ns=(created, created))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's numbers, in row-major order."""
    flat: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _header(slots: Mapping[str, Slot], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors header with the length before it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, slot in slots.items():
        end = position + slot.nbytes
        entries[name] = {
            "dtype": _NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text
