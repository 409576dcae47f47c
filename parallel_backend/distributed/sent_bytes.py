"""Counting the bytes that a rank really sends, at the dispatcher, whoever asks for them.

Everything that goes through ``torch.distributed`` ends in an operator of ``c10d`` or ``_c10d_functional``: our own
exchanges, DTensor's, FSDP's. What one sends is counted as its ring algorithm sends it, where it has one.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from .collectives import agree, gather
from .mesh import Axis


class SentBytes(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        by_kind: bytes by the name of the operator; fractions, since a tensor need not divide by the ranks.

    Raises:
        NotImplementedError: a collective that it does not know, so that nothing is left out unseen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_kind: dict[str, Fraction] = defaultdict(Fraction)

    @property
    def total(self) -> int:
        """Bytes sent by this rank."""
        return int(sum(self.by_kind.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._schema.name.partition("::")[2]
            if name not in _SENT:
                raise NotImplementedError(f"{func.namespace}::{name} is not counted")
            self.by_kind[name] += _SENT[name](*args)
        return func(*args, **(kwargs or {}))


class Measured:
    """Seconds that the ranks take while it is entered, which all of them do together, and bytes that they send.

    ``count`` says whether bytes are wanted, which costs time of its own at every operator.
    """

    def __init__(self, axis: Axis, device: torch.device, *, count: bool) -> None:
        self.axis, self.device, self.seconds = axis, device, 0.0
        self.sent = SentBytes() if count else None

    def __enter__(self) -> "Measured":
        agree(0, self.axis)
        self._start = self._now()
        if self.sent:
            self.sent.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self.sent:
            self.sent.__exit__(*error)  # type: ignore[no-untyped-call]
        self.seconds = self._now() - self._start

    def of_all_ranks(self) -> dict[str, Tensor]:
        """Rank 0's ``seconds`` ``[1]``, and ``sent_bytes`` ``[ranks]`` int64 if counted; nothing on other ranks."""
        done = {"seconds": torch.tensor([self.seconds])}
        if self.sent:
            done["sent_bytes"] = torch.cat(gather(torch.tensor([self.sent.total]), [1] * self.axis.size, self.axis))
        return done if self.axis.index == 0 else {}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _group(boxed: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _all_to_all(_out: Tensor, sent: Tensor, group: Any, _into: list[int], split: list[int], *_: Any) -> int:
    """All but the own part."""
    whole = _group(group)
    rows = split[whole.rank()] if split else sent.shape[0] // whole.size()
    return _bytes(sent) - rows * (_bytes(sent) // max(sent.shape[0], 1))


def _functional_all_to_all(sent: Tensor, _into: list[int], split: list[int], group: Any) -> int:
    """All but the own part."""
    whole: dist.ProcessGroup = _resolve_process_group(group)
    return _bytes(sent) - split[whole.rank()] * (_bytes(sent) // max(sent.shape[0], 1))


def _functional_all_gather(own: Tensor, size: int, _group: Any) -> int:
    return (size - 1) * _bytes(own)


def _all_reduce(tensors: list[Tensor], group: Any, *_: Any) -> Fraction:
    size = _group(group).size()
    return Fraction(2 * (size - 1) * sum(map(_bytes, tensors)), size)


def _all_gather(_out: Tensor, own: Tensor, group: Any, *_: Any) -> int:
    return (_group(group).size() - 1) * _bytes(own)


def _send(tensors: list[Tensor], *_: Any) -> int:
    return sum(map(_bytes, tensors))


def _broadcast(tensors: list[Tensor], group: Any, root: int, *_: Any) -> int:
    whole = _group(group)
    return (whole.size() - 1) * sum(map(_bytes, tensors)) if whole.rank() == root else 0


def _nothing(*_: Any) -> int:
    return 0


_SENT: dict[str, Callable[..., int | Fraction]] = {
    "alltoall_base_": _all_to_all,
    "all_to_all_single": _functional_all_to_all,
    "all_gather_into_tensor": _functional_all_gather,
    "allreduce_": _all_reduce,
    "_allgather_base_": _all_gather,
    "send": _send,
    "recv_": _nothing,
    "broadcast_": _broadcast,
    "barrier": _nothing,
    "wait_tensor": _nothing,
    "_wrap_tensor_autograd": _nothing,
}
