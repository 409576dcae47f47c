"""A full device: which errors mean it, and memory that others than torch can use again."""

import torch
import torch.distributed as dist

_FULL = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA malloc", "STATUS_ALLOC_FAILED")
"""Texts of errors of CUDA, NCCL, cuBLAS and cuDNN for an allocation on the device that failed."""

_HERE = "unhandled cuda error"
"""What NCCL calls a CUDA call that failed in this process. It has other words for a lost connection."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that this rank's own device is full.

    torch raises an error of its own only for its own allocator. NCCL, cuBLAS and CUDA itself allocate outside of it,
    and their errors differ by their text alone.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(full in text for full in _FULL):
        return False
    return not isinstance(error, dist.DistError) or _HERE in text


def release_cache(device: torch.device) -> None:
    """Return what torch's allocator keeps for later to the device, where NCCL can allocate it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
