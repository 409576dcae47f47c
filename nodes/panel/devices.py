"""What ranks can run on here, for the first time that somebody opens the page."""

from typing import Any

from ...parallel_backend import env
from ...parallel_backend.client import gpus
from ...parallel_backend.errors import InvalidRequest


def found_devices() -> dict[str, Any]:
    """Return the names of the GPUs, and how many CPU ranks there are without any; an error says why none is usable."""
    try:
        count = gpus.count()
        return {"gpus": _names(count), "processes": 0 if count else env.CPU_RANKS.get(), "problem": ""}
    except InvalidRequest as error:
        return {"gpus": [], "processes": 0, "problem": str(error)}


def _names(count: int) -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(count)]
