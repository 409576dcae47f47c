"""Communication between ranks during a request: point-to-point exchanges, and broadcasts and reductions over a group.

Every rank knows the size of every message in advance, so no sizes are ever sent.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidRequest, NoRoom, from_code
from ..progress import PROGRESS
from .mesh import Axis

Parts = Sequence[Tensor]
"""The tensors sent to, or received from, one rank."""

PeerTensor = tuple[int, Tensor]
"""The index of another rank on the axis, and a tensor to send to it or receive from it."""

_MAX_PENDING = 8
"""Sends that a ``PendingSends`` keeps in flight."""


class Work(Protocol):
    """A communication that has been started."""

    def wait(self) -> Any:
        """Block until it is complete."""


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate, without the copy that ``torch.cat`` makes of a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def start_exchange(outgoing: Sequence[Parts], incoming: Sequence[Parts], axis: Axis) -> Sequence[Work]:
    """Start sending ``outgoing[i]`` to rank ``i`` of the axis and receiving ``incoming[i]`` from it.

    This rank's entries for itself are skipped; see ``start_messages``.
    """
    return start_messages(_for_peers(outgoing, axis), _for_peers(incoming, axis), axis)


def start_messages(sends: Iterable[PeerTensor], receives: Iterable[PeerTensor], axis: Axis) -> Sequence[Work]:
    """Start sending tensors to other ranks of the axis, and receiving tensors from them.

    All tensors are contiguous. Empty tensors are skipped; sender and receiver skip the same ones, because both know all
    sizes. The caller waits for the returned works and does not touch the tensors before that.
    """
    sends = [each for each in sends if each[1].numel()]
    receives = [each for each in receives if each[1].numel()]
    if not sends and not receives:
        return []
    if staged(axis, (sends or receives)[0][1]):
        return [_StagedExchange(sends, receives, axis)]
    return _exchange(sends, receives, axis)


def staged(axis: Axis, tensor: Tensor) -> bool:
    """Whether an exchange of this tensor goes through CPU memory.

    gloo cannot send from or receive into GPU memory. Its gathers, sums and broadcasts copy by themselves.
    """
    return axis.gloo and tensor.is_cuda


def wait_all(works: Iterable[Work]) -> None:
    """Wait for all ``works``."""
    with PROGRESS.waiting():
        for work in works:
            work.wait()


class _StagedExchange:
    """An exchange of copies in CPU memory. ``wait_all`` moves what arrived to its destination."""

    def __init__(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], axis: Axis) -> None:
        self._received = [(tensor, torch.empty_like(tensor, device="cpu")) for _, tensor in receives]
        copies = [(i, tensor.to("cpu", copy=True)) for i, tensor in sends]
        buffers = [(i, buffer) for (i, _), (_, buffer) in zip(receives, self._received, strict=True)]
        self._works = _exchange(copies, buffers, axis)

    def wait(self) -> None:
        """See ``Work``."""
        wait_all(self._works)
        for tensor, buffer in self._received:
            tensor.copy_(buffer)


def _for_peers(parts_by_rank: Sequence[Parts], axis: Axis) -> list[PeerTensor]:
    return [(i, part) for i, parts in enumerate(parts_by_rank) for part in parts if i != axis.index]


def _exchange(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], axis: Axis) -> Sequence[Work]:
    start = _coalesced if coalesces(axis, (sends or receives)[0][1]) else _batched
    return start(sends, receives, axis)


def coalesces(axis: Axis, tensor: Tensor) -> bool:
    """Whether messages of this tensor's device can start as one operation. NCCL carries those of GPUs."""
    return tensor.is_cuda and not axis.gloo


def _coalesced(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], axis: Axis) -> Sequence[Work]:
    """Start all in one operation, as ``torch.distributed.batch_isend_irecv`` does in four times the host's time."""
    group, device = axis.group, (sends or receives)[0][1].device
    assert group is not None
    group._start_coalescing(device)
    for to, tensor in sends:
        group.send([tensor], to, axis.tag)
    for source, tensor in receives:
        group.recv([tensor], source, axis.tag)
    return [group._end_coalescing(device)]


def _batched(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], axis: Axis) -> Sequence[Work]:
    directions = ((dist.isend, sends), (dist.irecv, receives))
    ops = [
        dist.P2POp(op, tensor, axis.ranks[i], group=axis.group, tag=axis.tag)
        for op, peer_tensors in (directions[::-1] if _over_a_network() else directions)
        for i, tensor in peer_tensors
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(ops)
    return works


def _over_a_network() -> bool:
    """Whether gloo was given a network interface other than loopback.

    Over a network, gloo uses both directions at once only if receives are posted first. Within one machine, where each
    rank has one core, posting sends first is faster, because gloo's threads wake each other less often.
    """
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo"


def send(tensor: Tensor, axis: Axis, to: int) -> Sequence[Work]:
    """Start sending a tensor to another rank of the axis; see ``start_messages``."""
    return start_messages([(to, tensor)], [], axis)


def receive(tensor: Tensor, axis: Axis, source: int) -> Sequence[Work]:
    """Start receiving a tensor from another rank of the axis; see ``start_messages``."""
    return start_messages([], [(source, tensor)], axis)


class PendingSends:
    """Sends in flight. Keeps each tensor alive until it is sent, and limits how many are in flight.

    ``send`` may block. Until it returns, the receiver may wait only for sends of this rank that are already in flight.
    Otherwise the two ranks deadlock.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Sequence[Work], Tensor]] = deque()

    def send(self, tensor: Tensor, axis: Axis, to: int) -> None:
        """Start sending a tensor; if too many sends are in flight, wait for the oldest."""
        self._in_flight.append((send(tensor, axis, to), tensor))
        if len(self._in_flight) > _MAX_PENDING:
            wait_all(self._in_flight.popleft()[0])

    def finish(self) -> None:
        """Wait for all sends."""
        while self._in_flight:
            wait_all(self._in_flight.popleft()[0])


def all_gather(local: Tensor, shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """Return every rank's tensor, on every rank of the axis. ``shapes[i]`` is the shape of rank ``i``'s tensor."""
    local = local.contiguous()
    gathered = [local if i == axis.index else local.new_empty(*shape) for i, shape in enumerate(shapes)]
    wait_all(start_exchange([[local]] * axis.size, [[part] for part in gathered], axis))
    return gathered


def start_all_to_all(
    sent: Tensor, send_sizes: Sequence[int], received: Tensor, receive_sizes: Sequence[int], axis: Axis
) -> Sequence[Work]:
    """Start sending part ``i`` of ``sent`` to rank ``i`` of the axis, and receiving its part into ``received``.

    It is one operation, and one launch, with NCCL. gloo sends parts between two ranks faster.

    Args:
        sent: contiguous; the parts lie one after the other. So they do in ``received``.
        send_sizes: number of values of each part, this rank's own included.
        receive_sizes: the same for ``received``.
    """
    sent, received = sent.view(-1), received.view(-1)
    if not axis.gloo:
        sizes = list(receive_sizes), list(send_sizes)
        return [dist.all_to_all_single(received, sent, *sizes, group=axis.group, async_op=True)]
    outgoing, incoming = sent.split(list(send_sizes)), received.split(list(receive_sizes))
    incoming[axis.index].copy_(outgoing[axis.index])
    return start_exchange([[part] for part in outgoing], [[part] for part in incoming], axis)


def scatter(parts: Sequence[Tensor], local: Tensor, axis: Axis) -> Tensor:
    """Send ``parts[i]`` from the axis's first rank to rank ``i``, into that rank's ``local``, and return it.

    ``parts`` is read on the first rank only, which moves the other ranks' parts to its device one at a time. Its GPU
    copies what is in pinned memory while the host goes on, so nothing may change such parts afterwards.
    """
    if axis.index:
        wait_all(receive(local, axis, 0))
        return local
    for to, part in enumerate(parts[1:], 1):
        wait_all(send(part.to(local.device, non_blocking=True).contiguous(), axis, to))
    return local.copy_(parts[0], non_blocking=True)


def gather(local: Tensor, sizes: Sequence[int], axis: Axis) -> list[Tensor]:
    """Return every rank's values, flattened, on the axis's first rank, and empty tensors on the others.

    ``sizes[i]`` is the number of values of rank ``i``.
    """
    local = local.reshape(-1)
    if axis.index:
        wait_all(start_exchange([[local]], [], axis))
        return [local[:0]] * axis.size
    gathered = [local, *(local.new_empty(size) for size in sizes[1:])]
    wait_all(start_exchange([], [[part] for part in gathered], axis))
    return gathered


def agree(value: int, axis: Axis) -> int:
    """Return the ``value`` of the axis's first rank on every rank, over the group's CPU backend."""
    if axis.size == 1:
        return value
    buffer = torch.tensor([value], dtype=torch.int64)
    with PROGRESS.waiting():
        dist.broadcast(buffer, axis.ranks[0], group=axis.group)
    return int(buffer.item())


def all_true(value: bool, axis: Axis) -> bool:
    """Whether ``value`` is true on every rank of the axis. Communicates over the group's CPU backend."""
    return bool(lowest(int(value), axis))


def lowest(value: int, axis: Axis) -> int:
    """Return the smallest ``value`` of the axis's ranks on every rank, over the group's CPU backend."""
    if axis.size == 1:
        return value
    buffer = torch.tensor([value])
    with PROGRESS.waiting():
        dist.all_reduce(buffer, dist.ReduceOp.MIN, group=axis.group)
    return int(buffer.item())


def gather_numbers(numbers: Sequence[int], axis: Axis) -> list[tuple[int, ...]]:
    """Return the ``numbers`` of every rank of the axis, on every rank, over the group's CPU backend.

    All ranks give equally many.
    """
    local = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(local) for _ in axis.ranks] if axis.size > 1 else [local]
    if axis.size > 1:
        with PROGRESS.waiting():
            dist.all_gather(gathered, local, group=axis.group)
    return [tuple(each.tolist()) for each in gathered]


def gather_texts(text: str, axis: Axis) -> list[str]:
    """Return the ``text`` of every rank of the axis, on every rank, over the group's CPU backend."""
    encoded = text.encode()
    lengths = [length for (length,) in gather_numbers([len(encoded)], axis)]
    if not any(lengths):
        return [""] * axis.size
    padded = gather_numbers(list(encoded.ljust(max(lengths))), axis)
    return [bytes(each[:length]).decode() for each, length in zip(padded, lengths, strict=True)]


@contextmanager
def refused_everywhere(axis: Axis) -> Iterator[None]:
    """Raises what some ranks of the axis refuse alike on the others, too: those that a layout leaves idle. Collective.

    Raises:
        InvalidRequest, NoRoom: the refusal.
    """
    mine = ""
    try:
        yield
    except (InvalidRequest, NoRoom) as error:
        mine = f"{error.code}\n{error}"
    refused = next(filter(None, gather_texts(mine, axis)), "")
    if refused:
        code, _, text = refused.partition("\n")
        raise from_code(code, text)


@contextmanager
def refused_alike(axis: Axis) -> Iterator[None]:
    """Raises a refusal of one rank on all ranks of the axis, for checks that may differ by rank. Collective.

    Raises:
        InvalidRequest: the first rank's refusal. It names the rank unless all ranks say the same.
    """
    refusal = ""
    try:
        yield
    except InvalidRequest as error:
        refusal = str(error)
    refusals = gather_texts(refusal, axis)
    for rank, text in zip(axis.ranks, refusals, strict=True):
        if text:
            raise InvalidRequest(text if len(set(refusals)) == 1 else f"rank {rank}: {text}")
