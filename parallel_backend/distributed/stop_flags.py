"""Rank 0's word to all ranks, part by part of some work, whether to go on."""

from collections.abc import Callable

import torch

from . import rank_speeds
from .collectives import PendingSends, receive, wait
from .mesh import Axis


class StopFlags:
    """Told a part ahead, and nobody answers, so that nobody waits; the first part's is told when this is made.

    Nothing else may go from rank 0 to others in the group of ``whole`` meanwhile.
    """

    def __init__(self, whole: Axis, device: torch.device, cancelled: Callable[[], bool]) -> None:
        self.whole, self.device, self.cancelled, self.stopped = whole, device, cancelled, False
        self._leaving = [PendingSends() for _ in whole.ranks]
        self._ahead = 0
        self.tell()

    def tell(self) -> None:
        """On rank 0, say it of the next part; other ranks count that it does, be it before or after they hear it."""
        self._ahead += 1
        if self.whole.index:
            return
        rank_speeds.wait(self.device)  # else the host runs ahead, and a cancel comes late
        self.stopped = self.cancelled()
        flag = torch.tensor([int(self.stopped)])
        for rank in range(1, self.whole.size):
            self._leaving[rank].send(flag, self.whole, rank)

    def go_on(self) -> bool:
        """Whether there is to be a next part."""
        self._ahead -= 1
        if self.whole.index:
            flag = torch.zeros(1, dtype=torch.int64)
            wait(receive(flag, self.whole, 0))
            self.stopped = bool(flag.item())
        return not self.stopped

    def finish(self) -> None:
        """Wait until all has left, and take in what is on its way, so that the next work does not."""
        while self._ahead > 0:
            self.go_on()
        for leaving in self._leaving:
            leaving.finish()
