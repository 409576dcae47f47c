"""Measures the network between hosts as ranks use it: from each host's first rank to the next host's first rank."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...distributed.collectives import start_exchange, wait_all
from ...distributed.mesh import Axis
from ...protocol.status import HostLink

PINGS = 8
ENOUGH = 0.05
"""Seconds that the largest transfer has to take, unless it has ``MOST`` bytes."""
LEAST, MOST, GROWTH = 1 << 18, 1 << 26, 4


def measure(world: Axis, hosts: Sequence[str], device: torch.device) -> HostLink | None:
    """Measure the links. Each rank calls it.

    Args:
        world: all ranks.
        hosts: the host of each rank; ranks of one host are adjacent.
        device: this rank's.

    Returns:
        The link from this rank to the previous host. None for ranks of the first host, and for all but a host's first
        rank.
    """
    firsts = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
    if world.index not in firsts or len(firsts) == 1:
        return None
    place, link = firsts.index(world.index), None
    where = torch.device("cpu") if world.gloo else device
    if place > 0:
        link = _Pair(world, firsts[place - 1], where).measure(hosts[firsts[place - 1]])
    if place + 1 < len(firsts):
        _Pair(world, firsts[place + 1], where).answer()
    return link


class _Pair:
    """This rank and another one."""

    def __init__(self, world: Axis, other: int, where: torch.device) -> None:
        self._world, self._other, self._where = world, other, where
        self._word = torch.zeros(1, dtype=torch.int64, device=where)

    def measure(self, host: str) -> HostLink:
        """Measure, and tell the other rank how many bytes to expect each time; 0 ends it."""
        latency = min(self._timed(self._word) for _ in range(PINGS)) / 2
        size, seconds = LEAST, 0.0
        while True:
            self._word.fill_(size)
            self._send(self._word)
            data = torch.empty(size, dtype=torch.uint8, device=self._where)
            seconds = self._timed(data) - 2 * latency
            if seconds >= ENOUGH or size >= MOST:
                break
            size *= GROWTH
        self._word.fill_(0)
        self._send(self._word)
        return HostLink(host=host, latency=latency, bandwidth=size / max(seconds, 1e-9))

    def answer(self) -> None:
        """Receive from the other rank."""
        for _ in range(PINGS):
            self._receive(self._word)
            self._send(self._word)
        while True:
            self._receive(self._word)
            size = int(self._word.item())
            if not size:
                return
            self._receive(torch.empty(size, dtype=torch.uint8, device=self._where))
            self._send(self._word)

    def _timed(self, data: Tensor) -> float:
        """Return the seconds from sending to the answer."""
        start = time.perf_counter()
        self._send(data)
        self._receive(self._word)
        self._word.item()  # waits for the GPU
        return time.perf_counter() - start

    def _send(self, tensor: Tensor) -> None:
        wait_all(start_exchange(self._only(tensor), [], self._world))

    def _receive(self, tensor: Tensor) -> None:
        wait_all(start_exchange([], self._only(tensor), self._world))

    def _only(self, tensor: Tensor) -> list[list[Tensor]]:
        return [[tensor] if rank == self._other else [] for rank in range(self._world.size)]
