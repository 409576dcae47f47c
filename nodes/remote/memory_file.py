"""The weights of a MODEL or VAE that ComfyUI holds, as a safetensors file in memory that the ranks read.

The file is anonymous (``memfd_create(2)``) and sealed. Ranks open it as ``/proc/<pid>/fd/<number>``, which the kernel
allows to processes of the same user. It takes the host's memory once, however many ranks read it.
"""

import fcntl
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.dtypes import STORED_NAMES
from ...parallel_backend.errors import InvalidRequest

_SPARE = 1 << 30
"""Bytes of memory that must stay free."""

_READ_THE_FILE = "load the model with Load Diffusion Model or Parallel Loader, so that the ranks read its file"


class MemoryFile:
    """A file in memory with the weights of a MODEL or VAE, patches applied. It lives as long as this object.

    At first it has a header only, and takes no memory: enough to check what it will hold. ``fill`` copies the weights.

    Args:
        patcher: ComfyUI's patcher.
        prefixes: the beginning of the names of the weights to copy, and what they begin with in the file instead.
        config: what the file's metadata says that the weights do not show.

    Attributes:
        path: where other processes open it.

    Raises:
        InvalidRequest: it does not fit into memory, or a weight is quantised.
    """

    def __init__(self, patcher: Any, prefixes: tuple[str, str], config: Mapping[str, Any]) -> None:
        old, new = prefixes
        self._patcher, self._prefix = patcher, old
        weights = {new + name.removeprefix(old): entry[0][0] for name, entry in patcher.get_key_patches(old).items()}
        header, size = _header(weights, config)
        _check_memory(size)
        self._start, self._size = len(header), len(header) + size
        self._descriptor = os.memfd_create("parallel-dit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.pwrite(self._descriptor, header, 0)
        os.truncate(self._descriptor, self._size)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def fill(self) -> None:
        """Copy the weights, and forbid changes from then on. ComfyUI's copy is not used any more.

        Shows progress on the node that is running, and ends when the user interrupts.

        Raises:
            InvalidRequest: the system refuses the memory.
        """
        weights = self._patcher.get_key_patches(self._prefix)
        self._patcher = None
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
        except OSError as error:
            raise InvalidRequest(
                f"the system gives no {self._size / 1e9:.1f} GB of memory for a copy of the model's weights ({error}): "
                f"{_READ_THE_FILE}"
            ) from error
        self._copy(weights)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)

    def _copy(self, weights: Mapping[str, list[Any]]) -> None:
        progress, position = comfy.utils.ProgressBar(len(weights)), self._start
        with mmap.mmap(self._descriptor, self._size) as target:
            for data in _patched(weights):
                comfy.model_management.throw_exception_if_processing_interrupted()
                target[position : position + len(data)] = data
                position += len(data)
                progress.update(1)


def _header(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return a safetensors header with the length before it, and the number of bytes that follow."""
    entries: dict[str, Any] = {"__metadata__": {"config": json.dumps(config)}}
    position = 0
    for name, tensor in weights.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in STORED_NAMES:
            kind = f"{type(tensor).__name__} of {tensor.dtype}"
            raise InvalidRequest(
                f"the model's {name} is a {kind}, which is not supported: load the model in bf16, fp16 or fp32"
            )
        end = position + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": STORED_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, position


def _patched(weights: Mapping[str, list[Any]]) -> Iterator[memoryview]:
    """Yield the bytes of each weight with its patches, computed one at a time by ComfyUI's own functions."""
    for key, ((weight, convert), *patches) in weights.items():
        if patches:
            value = convert(weight.to(torch.float32, copy=True), inplace=True)
            merged = comfy.lora.calculate_weight(patches, value, key)
            weight = comfy.float.stochastic_rounding(merged, weight.dtype, seed=zlib.crc32(key.encode()))
        data = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        yield memoryview(data.numpy())


def _check_memory(size: int) -> None:
    available = comfy.model_management.get_free_memory(torch.device("cpu"))
    if size + _SPARE > available:
        raise InvalidRequest(
            f"one more copy of the model's weights takes {size / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory "
            f"are free: {_READ_THE_FILE}"
        )
