"""Finds the cause of an error in its text: CUDA, NCCL, gloo and torch's store, with torch 2.8 to 2.13.

Types say little: all errors of NCCL have one type, and all errors of CUDA another. A process that aborts leaves only
its log.
"""

from enum import Enum, auto


class Cause(Enum):
    """What caused an error on a rank.

    Attributes:
        FULL: this rank's device is full.
        OWN: this rank's device failed otherwise, or this rank used it or NCCL wrongly.
        PEER: another rank is gone, or did not answer in time.
        UNKNOWN: the text does not tell.
    """

    FULL = auto()
    OWN = auto()
    PEER = auto()
    UNKNOWN = auto()


_REMOTE = ("ncclRemoteError", "remote process exited", "collective operation timeout")
"""NCCL's words for another rank. Text after them may be of an earlier error."""
_FULL = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA malloc", "STATUS_ALLOC_FAILED")
"""An allocation on the device failed."""
_DEVICE = (
    "unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure", "HIP failure", "CUDA error", "HIP error",
    "CUDA driver error", "HIP driver error", "Triton Error", "cuDNN error", "miopenStatus", "CUBLAS_STATUS",
    "CUFFT", "No CUDA GPUs are available", "No HIP GPUs are available",
    "cudaGetDeviceCount", "CUDA initialization", "device-side assert triggered",
)  # fmt: skip
"""A call of this process on its own device failed."""
_LOST = (
    "Connection closed by", "Connection reset by peer", "Connection was likely closed", "Connection refused",
    "Broken pipe", "imed out", "wait timeout", "Got completion from peer", "gloo/",
)  # fmt: skip
"""The connection to another rank failed, in the words of NCCL, gloo, the store and the kernel."""
_USE = ("ncclSystemError", "ncclInvalidUsage", "ncclInvalidArgument")
"""NCCL failed on this machine, such as for lack of space in ``/dev/shm``, or for two ranks on one GPU."""
_STICKY = (
    "illegal memory access", "illegal instruction", "unspecified launch failure", "device-side assert triggered",
    "misaligned address", "hardware stack error", "invalid program counter", "global/shared address space",
    "launch timed out", "uncorrectable ECC error", "uncorrectable NVLink error", "peer GPU memory over nvlink",
    "unknown error",
)  # fmt: skip
"""CUDA's sentences for errors after which every later call of the process fails, too (``cudaGetErrorString``)."""


def cause(text: str) -> Cause:
    """Return the cause that the text of an error names."""
    if _has(text, _REMOTE):
        return Cause.PEER
    if _has(text, _DEVICE):
        return Cause.FULL if _has(text, _FULL) and not breaks_device(text) else Cause.OWN
    if _has(text, _LOST):
        return Cause.PEER
    if _has(text, _USE):
        return Cause.OWN
    return Cause.FULL if _has(text, _FULL) else Cause.UNKNOWN


def breaks_device(text: str) -> bool:
    """Whether the error leaves the device unusable for this process."""
    return _has(text, _STICKY)


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)
