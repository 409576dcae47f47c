"""Counts the bytes that a rank sends, at PyTorch's dispatcher, whichever code sends them.

All communication through ``torch.distributed`` (this package's exchanges, DTensor, FSDP) ends in an operator of
``c10d`` or ``_c10d_functional``. A collective with a ring algorithm counts the bytes of that algorithm.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from time import perf_counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from .collectives import agree, gather
from .mesh import Axis


class SentBytes(TorchDispatchMode):
    """Counts the bytes sent while it is entered.

    Attributes:
        counting: how many are entered in this process.
        by_kind: bytes by the operator's name. They are fractions, because a tensor's size need not be divisible by the
            number of ranks.

    Raises:
        NotImplementedError: an operator without a formula was called; skipping it would give a wrong count.
    """

    counting: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_kind: dict[str, Fraction] = defaultdict(Fraction)

    def __enter__(self) -> Self:
        SentBytes.counting += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        SentBytes.counting -= 1
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> int:
        """Bytes sent by this rank."""
        return int(sum(self.by_kind.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func.overloadpacket.__name__
            if name not in BYTES_SENT:
                raise NotImplementedError(f"{func.namespace}::{name} is not counted")
            self.by_kind[name] += BYTES_SENT[name](*args)
        return func(*args, **(kwargs or {}))


class Measurement:
    """Context manager that measures the time taken and, if asked, the bytes sent. All ranks enter it together.

    Args:
        axis: the ranks that are measured.
        device: this rank's device.
        count: whether to count bytes, which makes every operator slower.

    Attributes:
        seconds: time between entry and exit.
        sent: the byte counter; None if bytes are not counted.
    """

    def __init__(self, axis: Axis, device: torch.device, *, count: bool) -> None:
        self.axis, self.device, self.seconds = axis, device, 0.0
        self.sent = SentBytes() if count else None

    def __enter__(self) -> "Measurement":
        agree(0, self.axis)
        self._start = self._now()
        if self.sent:
            self.sent.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.sent:
            self.sent.__exit__(*error)
        self.seconds = self._now() - self._start

    def of_all_ranks(self) -> dict[str, Tensor]:
        """Return rank 0's ``seconds`` ``[1]`` and, if counted, ``sent_bytes`` ``[ranks]`` int64; {} on other ranks."""
        results = {"seconds": torch.tensor([self.seconds])}
        if self.sent:
            results["sent_bytes"] = torch.cat(gather(torch.tensor([self.sent.total]), [1] * self.axis.size, self.axis))
        return results if self.axis.index == 0 else {}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _unboxed(boxed: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)


def _all_to_all(_out: Tensor, sent: Tensor, boxed: Any, _receive_rows: list[int], send_rows: list[int], *_: Any) -> int:
    """Everything except the part for this rank itself."""
    group = _unboxed(boxed)
    kept_rows = send_rows[group.rank()] if send_rows else sent.shape[0] // group.size()
    return _bytes(sent) - kept_rows * (_bytes(sent) // max(sent.shape[0], 1))


def _functional_all_to_all(sent: Tensor, _receive_rows: list[int], send_rows: list[int], name: Any) -> int:
    """Everything except the part for this rank itself."""
    group: dist.ProcessGroup = _resolve_process_group(name)
    return _bytes(sent) - send_rows[group.rank()] * (_bytes(sent) // max(sent.shape[0], 1))


def _functional_all_gather(local: Tensor, size: int, _name: Any) -> int:
    return (size - 1) * _bytes(local)


def _all_reduce(tensors: list[Tensor], boxed: Any, *_: Any) -> Fraction:
    size = _unboxed(boxed).size()
    return Fraction(2 * (size - 1) * sum(map(_bytes, tensors)), size)


def _all_gather(_out: Tensor, local: Tensor, boxed: Any, *_: Any) -> int:
    return (_unboxed(boxed).size() - 1) * _bytes(local)


def _send(tensors: list[Tensor], *_: Any) -> int:
    return sum(map(_bytes, tensors))


def _broadcast(tensors: list[Tensor], boxed: Any, root: int, *_: Any) -> int:
    group = _unboxed(boxed)
    return (group.size() - 1) * sum(map(_bytes, tensors)) if group.rank() == root else 0


def _nothing(*_: Any) -> int:
    return 0


BYTES_SENT: dict[str, Callable[..., int | Fraction]] = {
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
"""By the operator's name, the bytes that this rank sends in a call, from the call's arguments."""
