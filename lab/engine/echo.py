"""A trial of the connection from the client to the ranks and back."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Progress, Trial

ECHO = "echo"


def echo(
    message: Trial, tensors: Mapping[str, Tensor] | None, report: Callable[[Progress, Mapping[str, Tensor]], None]
) -> dict[str, Tensor]:
    """Return the request's tensors on rank 0, an empty dict on other ranks.

    With an amount above 0 there is also ``made`` ``[amount]`` float32. ``Progress("reply", 0, 1)`` comes just before.

    Raises:
        InvalidRequest: the amount is too large.
    """
    if tensors is None:
        return {}
    results = dict(tensors)
    if message.amount:
        try:
            results["made"] = torch.full((message.amount,), 0.5)
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(f"{message.amount} numbers cannot be made, or do not fit into memory") from error
    report(Progress(phase="reply", value=0, total=1), {})
    return results
