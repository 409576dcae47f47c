"""How much memory a piece of work takes at most."""

import os
from types import TracebackType

import torch

from .. import processes


class PeakMemory:
    """While it is entered, the most that is held beyond what was held before, in ``bytes`` after.

    On a GPU it is what PyTorch has allocated, else the process's resident memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            processes.trim()
            processes.forget_peak(os.getpid())
            self._before = processes.peak(os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cuda = self.device.type == "cuda"
        self.bytes = (
            torch.cuda.max_memory_allocated(self.device) if cuda else processes.peak(os.getpid())
        ) - self._before
