"""Requests that use no model: they try the way from the client to the ranks, and the links between ranks."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..progress import PROGRESS
from ..protocol.messages import Echo, Exchange, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..distributed.mesh import Axis

MAX_BYTES = 1 << 28
"""Most bytes of an ``Exchange``."""
_SHORT_ROUNDS, _LONG_ROUNDS = 20, 3


def echo(
    message: Echo,
    tensors: "Mapping[str, Tensor] | None",
    report: "Callable[[Progress, Mapping[str, Tensor]], None]",
) -> "dict[str, Tensor]":
    """Return the request's tensors on rank 0, an empty dict on other ranks.

    Raises:
        InvalidRequest: the numbers to make are too many.
    """
    import torch

    if tensors is None:
        return {}
    results = dict(tensors)
    if message.make:
        try:
            results["made"] = torch.full((message.make,), 0.5)
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(f"{message.make} numbers cannot be made, or do not fit into memory") from error
    report(Progress(phase="reply", value=0, total=1), {})
    return results


def exchange(message: Exchange, *, rank: int, world_size: int, device: "torch.device") -> "dict[str, Tensor]":
    """Exchange data with all ranks; return the seconds that it took on rank 0, an empty dict on other ranks.

    Raises:
        InvalidRequest: there is one rank, or the number of bytes is not allowed. On every rank alike.
        RuntimeError: wrong values arrived on some rank.
    """
    import torch

    from ..distributed.world import world

    if world_size < 2 or not 4 <= message.nbytes <= MAX_BYTES:
        raise InvalidRequest(
            f"an exchange of {message.nbytes} bytes between {world_size} ranks: it needs two ranks or more, and 4 to "
            f"{MAX_BYTES} bytes"
        )
    axis = world(rank, world_size)
    with PROGRESS.phase("exchanging"):
        latency = _median_seconds(torch.full((1,), rank + 1.0, device=device), axis, _SHORT_ROUNDS)
        seconds = _median_seconds(torch.full((message.nbytes // 4,), rank + 1.0, device=device), axis, _LONG_ROUNDS)
    return {} if rank else {"latency": torch.tensor([latency]), "seconds": torch.tensor([seconds])}


def _median_seconds(local: "Tensor", axis: "Axis", rounds: int) -> float:
    """Send a tensor to all ranks, and return the median time. The first round, which connects, does not count."""
    from ..distributed.collectives import agree, all_gather, all_true

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


def _now(tensor: "Tensor") -> float:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
