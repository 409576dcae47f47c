"""What torch's CUDA operators do with tensors of the CPU, and which of them make the host wait for the GPU."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_COPIES = ("_to_copy", "copy_", "copy", "_foreach_copy_")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
"""They copy indices on the CPU to the GPU themselves."""
_FILLS = ("fill", "fill_")
"""They read a number on the CPU on the host."""
_WAITING = {
    "_local_scalar_dense": "reads a number",
    "_linalg_check_errors": "reads a status",
    "_unique2": "needs a size",
    "bincount": "needs a size",
    "equal": "reads a number",
    "masked_select": "needs a size",
    "nonzero": "needs a size",
    "unique_consecutive": "needs a size",
    "unique_dim": "needs a size",
}
"""CUDA operators after which the host knows a number, or the size of a result, that the GPU has computed."""


@cache
def name_of(func: Any) -> str:
    """Return an operator's name without namespace and overload."""
    name: str = func._schema.name.partition("::")[2]
    return name


def is_mixed(func: Any, on_gpu: Sequence[Tensor], on_cpu: Sequence[Tensor]) -> bool:
    """Whether torch refuses an operator for the devices of its tensors.

    On the CPU may be numbers of 0 dims in elementwise operators, and indices.
    """
    name = name_of(func)
    if not on_gpu or not on_cpu or name in _COPIES:
        return False
    if name in _INDEXED:
        return any(tensor.ndim and tensor.is_floating_point() for tensor in on_cpu)
    elementwise = name in _FILLS or torch.Tag.pointwise in func.tags
    return not elementwise or any(tensor.ndim for tensor in on_cpu)


def wait_of(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """Return why the host waits for the GPU in an operator that copies nothing; None if it does not."""
    name = name_of(func)
    if name in _INDEXED and any(_is_mask(index) for index in args[1]):
        return None if _writes_one_number(name, args) else "counts a mask"
    if name == "repeat_interleave" and options.get("output_size") is None:
        return "needs a size"
    return _WAITING.get(name)


def copy_of(
    func: Any, args: Sequence[Any], options: Mapping[str, Any], on_gpu: Sequence[Tensor], on_cpu: Sequence[Tensor]
) -> str | None:
    """Return which way an operator copies between the CPU and the GPU, if the host waits for the copy.

    torch waits for the stream after each such copy, in both directions, unless it is asked for as ``non_blocking``.
    """
    name = name_of(func)
    if options.get("non_blocking"):
        return None
    if name == "_to_copy":
        device = options.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        return None if device is None or bool(on_gpu) == to_gpu else f"copies to the {'GPU' if to_gpu else 'CPU'}"
    if name in _COPIES and on_gpu and on_cpu and True not in args[2:]:
        written = args[0] if isinstance(args[0], Tensor) else args[0][0]
        return f"copies to the {'CPU' if any(each is written for each in on_cpu) else 'GPU'}"
    if name in _INDEXED and any(index is each for index in args[1] for each in on_cpu):
        return "copies an index to the GPU"
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _writes_one_number(name: str, args: Sequence[Any]) -> bool:
    """Whether an assignment to the places of a mask is of one number, for which CUDA does not count the places."""
    return "put" in name and args[2].numel() == 1 and sum(index is not None for index in args[1]) == 1
