"""How busy a GPU is, by NVIDIA's management library, which comes with the driver."""

import ctypes
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def load_of(device: "torch.device") -> float | None:
    """Return the share of the last moments for which a kernel ran, 0 to 1; None where the library says nothing.

    AMD's GPUs have no such library, and a slice of a GPU (MIG) has no such number.
    """
    with suppress(OSError, AttributeError, RuntimeError):
        handle = _handle(device.index or 0)
        rates = _Utilization()
        if handle is not None and not _nvml().nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
            return float(rates.gpu) / 100
    return None


@cache
def _nvml() -> Any:
    library = ctypes.CDLL(_LIBRARY)
    if library.nvmlInit_v2():
        raise OSError(f"{_LIBRARY} does not start")
    return library


@cache
def _handle(index: int) -> ctypes.c_void_p | None:
    """Return the library's handle of torch's device, which it finds by the device's unique id."""
    import torch

    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
    return None if _nvml().nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) else handle
