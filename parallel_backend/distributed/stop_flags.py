"""Stop flags: before each part of some work, rank 0 tells all ranks whether to go on."""

from collections.abc import Callable

import torch

from . import rank_speeds
from .collectives import PendingSends, receive, wait_all
from .mesh import Axis


class StopFlags:
    """One flag for each part of the work, sent one part ahead and unacknowledged, so that no rank blocks.

    Creating the object sends the first part's flag. Until ``finish`` returns, rank 0 must send nothing else to the
    other ranks in the group of ``whole``.

    Attributes:
        stopped: whether rank 0 asked to stop, as far as this rank knows.
    """

    def __init__(self, whole: Axis, device: torch.device, cancelled: Callable[[], bool]) -> None:
        self.whole, self.device, self.cancelled, self.stopped = whole, device, cancelled, False
        self._pending_sends = [PendingSends() for _ in whole.ranks]
        self._flags_ahead = 0
        self.send_next()

    def send_next(self) -> None:
        """Send the next part's flag from rank 0. Other ranks only count it; they may receive it later."""
        self._flags_ahead += 1
        if self.whole.index:
            return
        rank_speeds.synchronize(self.device)  # otherwise the host queues steps ahead and a cancel takes effect late
        self.stopped = self.cancelled()
        flag = torch.tensor([int(self.stopped)])
        for rank in range(1, self.whole.size):
            self._pending_sends[rank].send(flag, self.whole, rank)

    def should_continue(self) -> bool:
        """Whether to start the next part. Waits for its flag on ranks other than 0."""
        self._flags_ahead -= 1
        if self.whole.index:
            flag = torch.zeros(1, dtype=torch.int64)
            wait_all(receive(flag, self.whole, 0))
            self.stopped = bool(flag.item())
        return not self.stopped

    def finish(self) -> None:
        """Wait for all sends, and drain flags still in flight so that later work does not receive them."""
        while self._flags_ahead > 0:
            self.should_continue()
        for sends in self._pending_sends:
            sends.finish()
