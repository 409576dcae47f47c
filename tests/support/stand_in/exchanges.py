"""What an operator of ``c10d`` sends and receives on this rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .notes import Part

Noted = tuple[dist.ProcessGroup, list[tuple[Part, Tensor]]]
"""A group, and the parts of an exchange with their tensors."""


def parts_of(name: str, args: Sequence[Any]) -> Noted:
    """Return the group and the parts of an exchange, given an operator's name and arguments.

    Raises:
        NotImplementedError: the operator is not known here, or is not waited for at once.
    """
    if name not in _PARTS:
        raise NotImplementedError(f"c10d::{name} is not known to the stand-in tensors")
    return _PARTS[name](*args)


def _part(kind: str, peer: int, tensor: Tensor, numel: int | None = None) -> tuple[Part, Tensor]:
    """A tensor, or ``numel`` values of it that lie one after another."""
    numel, contiguous = tensor.numel() if numel is None else numel, tensor.is_contiguous()
    return Part(kind=kind, peer=peer, numel=numel, dtype=tensor.dtype, contiguous=contiguous), tensor


def _message(kind: str) -> Callable[..., Noted]:
    def parts(tensors: list[Tensor], boxed: Any, peer: int, *_: Any) -> Noted:
        group = dist.ProcessGroup.unbox(boxed)
        return group, [_part(kind, dist.get_global_rank(group, peer), tensor) for tensor in tensors]

    return parts


def _broadcast(tensors: list[Tensor], boxed: Any, root: int, _: int, is_async: bool = True, *__: Any) -> Noted:
    group = _waited_at_once(boxed, is_async)
    return group, [_part("broadcast", dist.get_global_rank(group, root), tensor) for tensor in tensors]


def _all_reduce(tensors: list[Tensor], boxed: Any, how: Any, _: Any, is_async: bool = True, *__: Any) -> Noted:
    return _waited_at_once(boxed, is_async), [_part("all_reduce", -1, tensor) for tensor in tensors]


def _all_gather(outs: list[list[Tensor]], given: list[Tensor], boxed: Any, is_async: bool = True, *_: Any) -> Noted:
    gathered = [_part("all_gather into", -1, tensor) for tensor in outs[0]]
    return _waited_at_once(boxed, is_async), [_part("all_gather", -1, given[0]), *gathered]


def _all_gather_flat(out: Tensor, given: Tensor, boxed: Any, is_async: bool = True, *_: Any) -> Noted:
    return _waited_at_once(boxed, is_async), [_part("all_gather", -1, given), _part("all_gather into", -1, out)]


def _all_to_all(
    out: Tensor, given: Tensor, boxed: Any, out_sizes: list[int], sizes: list[int], is_async: bool = True, *_: Any
) -> Noted:
    """Messages to and from every other rank, as NCCL carries it out."""
    group = _waited_at_once(boxed, is_async)
    parts = [
        _part(kind, dist.get_global_rank(group, peer), tensor, length)
        for kind, tensor, lengths in (("send", given, sizes), ("receive", out, out_sizes))
        for peer, length in enumerate(lengths)
        if peer != group.rank() and length
    ]
    return group, parts


def _waited_at_once(boxed: Any, is_async: bool) -> dist.ProcessGroup:
    if is_async:
        raise NotImplementedError("nothing notes when an asynchronous collective is waited for")
    return dist.ProcessGroup.unbox(boxed)


_PARTS: dict[str, Callable[..., Noted]] = {
    "send": _message("send"),
    "recv_": _message("receive"),
    "broadcast_": _broadcast,
    "allreduce_": _all_reduce,
    "allgather_": _all_gather,
    "alltoall_base_": _all_to_all,
    "_allgather_base_": _all_gather_flat,
}
