"""Peak memory of a piece of work."""

import os
from types import TracebackType

import torch

from parallel_backend import processes


class PeakMemory:
    """Context manager that measures the peak of memory use above its level on entry.

    Attributes:
        device: the measured device: on a GPU the memory allocated by PyTorch, otherwise the process's resident memory.
        bytes: the peak, after exit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            processes.trim_heap()
            processes.reset_peak_memory(os.getpid())
            self._before = processes.peak_memory(os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cuda = self.device.type == "cuda"
        self.bytes = (
            torch.cuda.max_memory_allocated(self.device) if cuda else processes.peak_memory(os.getpid())
        ) - self._before
