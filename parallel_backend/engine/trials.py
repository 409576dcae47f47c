"""Requests that use no model: they try the links between ranks."""

import time

import torch
from torch import Tensor

from ..distributed.collectives import agree, all_gather, all_true
from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..progress import PROGRESS
from ..protocol.messages import Trial

EXCHANGE = "exchange"
MAX_BYTES = 1 << 28
"""Most bytes that a rank sends to each other one."""
_SHORT_ROUNDS, _LONG_ROUNDS = 20, 3


def run(message: Trial, world: Axis, device: torch.device) -> dict[str, Tensor]:
    """Exchange data with all ranks; return the seconds that it took on rank 0, an empty dict on other ranks.

    Raises:
        InvalidRequest: there is no such trial, there is one rank, or the number of bytes is not allowed. On every rank
            alike.
        RuntimeError: wrong values arrived on some rank.
    """
    if message.name != EXCHANGE:
        raise InvalidRequest(f"there is no trial {message.name!r}: {EXCHANGE!r} would work")
    if world.size < 2 or not 4 <= message.amount <= MAX_BYTES:
        raise InvalidRequest(
            f"an exchange of {message.amount} bytes between {world.size} ranks: it needs two ranks or more, and 4 to "
            f"{MAX_BYTES} bytes"
        )
    with PROGRESS.phase("exchanging"):
        latency = _median_seconds(torch.full((1,), world.index + 1.0, device=device), world, _SHORT_ROUNDS)
        whole = torch.full((message.amount // 4,), world.index + 1.0, device=device)
        seconds = _median_seconds(whole, world, _LONG_ROUNDS)
    return {} if world.index else {"latency": torch.tensor([latency]), "seconds": torch.tensor([seconds])}


def _median_seconds(local: Tensor, axis: Axis, rounds: int) -> float:
    """Send a tensor to all ranks, and return the median time. The first round, which connects, does not count."""
    seconds = []
    for _ in range(rounds + 1):
        agree(0, axis)
        start = _now(local)
        gathered = all_gather(local, [local.shape] * axis.size, axis)
        seconds.append(_now(local) - start)
        PROGRESS.tick()
    right = all(bool((part == i + 1).all()) for i, part in enumerate(gathered))
    if not all_true(right, axis):
        raise RuntimeError("an exchange between the ranks returned wrong values")
    return sorted(seconds[1:])[rounds // 2]


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
