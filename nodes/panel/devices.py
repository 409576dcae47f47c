"""What ranks can run on here: for the first time that somebody opens the page, and for the nodes' ``devices``."""

from itertools import combinations
from typing import Any

from ...parallel_backend import env
from ...parallel_backend.client import gpus
from ...parallel_backend.errors import BackendError, InvalidRequest
from ..backend.devices import parse_devices

ALL = "all"
FEW = 4
"""Up to so many GPUs, every choice of them is offered; of more, each one and those that lie side by side."""
PROCESSES = 4
"""The most CPU processes that are offered; more can be written."""


def found_devices() -> dict[str, Any]:
    """Return the names of the GPUs, the number of CPU ranks without any, and what ``devices`` can be.

    ``problem`` says why no GPU is usable.
    """
    try:
        count = gpus.count()
        found = {"gpus": _names(count), "processes": 0 if count else env.CPU_RANKS.get(), "problem": ""}
    except InvalidRequest as error:
        return {"gpus": [], "processes": 0, "problem": str(error), "choices": [{"value": ALL, "count": 0}]}
    return found | {"choices": [_everything(), *map(_choice, offered(count))]}


def offered(count: int) -> list[tuple[int, ...]]:
    """Return the lists of devices to offer beside all of them, with ``count`` GPUs; without any, of CPU ranks."""
    if not count:
        return [tuple(range(size)) for size in range(1, PROCESSES + 1)]
    if count <= FEW:
        return [each for size in range(1, count) for each in combinations(range(count), size)]
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count]
    starts = ((start, size) for size in sizes for start in range(0, count - size + 1, size))
    return [tuple(range(start, start + size)) for start, size in starts]


def _choice(indices: tuple[int, ...]) -> dict[str, Any]:
    return {"value": ",".join(map(str, indices)), "count": len(indices)}


def _everything() -> dict[str, Any]:
    """Return the choice of all devices, those of other hosts too; a backend that does not answer has an unknown number.

    Blocks for as long as the backend takes to answer.
    """
    try:
        return {"value": ALL, "count": len(parse_devices(ALL).indices)}
    except BackendError:
        return {"value": ALL, "count": 0}


def _names(count: int) -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(count)]
