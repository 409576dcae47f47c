"""How full and how busy a rank's device is: what the panel and ``status`` show beside the rank's own memory."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..protocol.status import RankStatus
from .gpu_load import load_of

if TYPE_CHECKING:
    import torch


class DeviceGauge:
    """Reads one device. For the thread of the heartbeats alone.

    A machine that computes as a CPU rank is measured by its memory and by this process's time on its cores.

    Args:
        device: the rank's device.
        clock: returns seconds.
        cpu_clock: returns the seconds that this process has used its cores.
    """

    def __init__(
        self,
        device: "torch.device",
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._device, self._clock, self._cpu_clock = device, clock, cpu_clock
        self._read_at, self._cpu_read = clock(), cpu_clock()
        self._cores = max(1, len(os.sched_getaffinity(0)))
        self._name = _name(device)

    def added_to(self, status: RankStatus) -> RankStatus:
        """Return the status with what the device says. It stays as it is where the device says nothing."""
        used, total = _memory(self._device)
        return replace(status, device_name=self._name, device_used=used, device_total=total, load=self._load())

    def _load(self) -> float | None:
        if self._device.type == "cuda":
            return load_of(self._device)
        now, cpu = self._clock(), self._cpu_clock()
        passed, used = now - self._read_at, cpu - self._cpu_read
        self._read_at, self._cpu_read = now, cpu
        return min(1.0, max(0.0, used / (passed * self._cores))) if passed > 0 else None


def _name(device: "torch.device") -> str:
    if device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(device)


def _memory(device: "torch.device") -> tuple[int, int]:
    """Return the bytes in use by all processes, and all bytes."""
    if device.type != "cuda":
        return _machine_memory()
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the GPU has failed; the working thread notices that itself
        return 0, 0
    return total - free, total


def _machine_memory() -> tuple[int, int]:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total - available, total
