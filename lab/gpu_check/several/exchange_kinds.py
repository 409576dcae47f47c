"""Every kind of exchange between the ranks of an axis, with values that each receiver can compute by itself.

All ranks of the axis run the same exchange at the same time. An exchange adds wrong values to ``wrong`` and goes on,
since the other ranks wait for it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.distributed import collectives
from parallel_backend.distributed.broadcast import broadcast_tensors
from parallel_backend.distributed.collectives import PendingSends, wait_all
from parallel_backend.distributed.mesh import Axis
from parallel_backend.distributed.stop_flags import StopFlags
from parallel_backend.protocol.tensors import describe

Kind = Callable[[Axis, torch.device, list[str]], None]

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
MESSAGES = 12
"""Messages from each rank to the next, more than ``PendingSends`` keeps in flight."""
PARTS, CANCELLED = 5, 3
"""Parts of some work, and the one before which rank 0 cancels it."""
_RANGE = 128
"""Values are below this, so that all dtypes hold them exactly."""


def values(source: int, to: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values that the rank at ``source`` sends to the rank at ``to``."""
    return ((torch.arange(count) * 3 + 31 * source + 7 * to) % _RANGE).to(device, dtype)


def expect(got: Tensor, wanted: Tensor, what: str, wrong: list[str]) -> None:
    """Add to ``wrong`` unless both are the same."""
    if not torch.equal(got.cpu(), wanted.cpu()):
        wrong.append(f"{what}: {got.flatten()[:4].tolist()} instead of {wanted.flatten()[:4].tolist()}")


def _count(source: int, to: int) -> int:
    """Return the number of sent values: uneven, and 0 between some ranks."""
    return 1000 * ((3 * source + 5 * to) % 4) + source


def exchange(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank sends to every other, as Ulysses does on gloo."""
    for dtype in DTYPES:
        me, everyone = axis.index, range(axis.size)
        outgoing = [[values(me, to, _count(me, to), dtype, device)] * 2 for to in everyone]
        incoming = [[torch.zeros(_count(source, me), dtype=dtype, device=device) for _ in "12"] for source in everyone]
        wait_all(collectives.start_exchange(outgoing, incoming, axis))
        for source in everyone:
            for part in incoming[source] if source != me else []:
                expect(part, values(source, me, _count(source, me), dtype, device), f"from {source} in {dtype}", wrong)


def all_to_all(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank sends to every other in one operation, as Ulysses does on NCCL."""
    me, everyone = axis.index, range(axis.size)
    sent = torch.cat([values(me, to, _count(me, to), torch.bfloat16, device) for to in everyone])
    wanted = torch.cat([values(source, me, _count(source, me), torch.bfloat16, device) for source in everyone])
    received = torch.zeros_like(wanted)
    sizes, arriving = ([_count(me, to) for to in everyone], [_count(source, me) for source in everyone])
    wait_all(collectives.start_all_to_all(sent, sizes, received, arriving, replace(axis, gloo=False)))
    expect(received, wanted, "all parts", wrong)


def ring(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank sends to the next and receives from the one before, until all have seen all, as ring does."""
    me, ranks = axis.index, axis.size
    block = values(me, 0, 500 + me, torch.bfloat16, device)
    for step in range(ranks - 1):
        owner = (me - step - 1) % ranks
        arriving = torch.zeros(500 + owner, dtype=torch.bfloat16, device=device)
        outgoing, incoming = [list[Tensor]() for _ in range(ranks)], [list[Tensor]() for _ in range(ranks)]
        outgoing[(me + 1) % ranks].append(block)
        incoming[(me - 1) % ranks].append(arriving)
        wait_all(collectives.start_exchange(outgoing, incoming, axis))
        expect(arriving, values(owner, 0, 500 + owner, torch.bfloat16, device), f"block of {owner}", wrong)
        block = arriving


def pipeline(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank passes messages on to the next one, as the stages of pipe do."""
    me, sends = axis.index, PendingSends()
    for number in range(MESSAGES):
        message = values(0, number, 700, torch.float32, device)
        if me:
            arriving = torch.zeros_like(message)
            wait_all(collectives.receive(arriving, axis, me - 1))
            expect(arriving, message, f"message {number}", wrong)
        if me + 1 < axis.size:
            sends.send(message, axis, me + 1)
    sends.finish()


def all_gather(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank gets every rank's tensor."""
    shapes = [(source % 3, 40) for source in range(axis.size)]
    wanted = [values(source, 0, 40 * rows, torch.float32, device) for source, (rows, _) in enumerate(shapes)]
    for source, part in enumerate(collectives.all_gather(wanted[axis.index].view(-1, 40), shapes, axis)):
        expect(part, wanted[source].view(-1, 40), f"part of {source}", wrong)


def scatter_and_gather(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """The first rank sends every rank its part, and gets them back."""
    wanted = [values(0, to, 10 + to, torch.float32, device) for to in range(axis.size)]
    local = collectives.scatter(wanted if axis.index == 0 else [], torch.zeros_like(wanted[axis.index]), axis)
    expect(local, wanted[axis.index], "scattered", wrong)
    parts = collectives.gather(local, [len(part) for part in wanted], axis)
    for source, part in enumerate(parts if axis.index == 0 else []):
        expect(part, wanted[source], f"gathered from {source}", wrong)


def broadcast(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank gets the first rank's tensors."""
    wanted = {str(number): values(number, 0, 33, dtype, torch.device("cpu")) for number, dtype in enumerate(DTYPES)}
    given = wanted if axis.index == 0 else None
    for name, tensor in broadcast_tensors(describe(wanted), given, axis, device).items():
        expect(tensor, wanted[name], f"tensor {name}", wrong)


def all_reduce(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank gets the sum, as tensor does."""
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((300,), float(axis.index + 1), device=device, dtype=dtype)
        dist.all_reduce(tensor, group=axis.group)
        expect(tensor, torch.full_like(tensor, axis.size * (axis.size + 1) / 2), f"sum in {dtype}", wrong)


def gather_weights(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Every rank gets the shards of all, as shard_weights does."""
    shards = torch.cat([values(source, 0, 256, torch.uint8, device) for source in range(axis.size)])
    whole = torch.zeros_like(shards)
    dist.all_gather_into_tensor(whole, shards.chunk(axis.size)[axis.index].clone(), group=axis.group)
    expect(whole, shards, "shards", wrong)


def agree(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """Numbers and texts of all ranks, in the CPU's memory, through the same group."""
    me, everyone = axis.index, range(axis.size)
    for what, got, wanted in (
        ("agree", collectives.agree(7 + me, axis), 7),
        ("all true", collectives.all_true(True, axis), True),
        ("one false", collectives.all_true(me != axis.size - 1, axis), False),
        ("numbers", collectives.gather_numbers([me, 5], axis), [(each, 5) for each in everyone]),
        ("texts", collectives.gather_texts("ä" * me, axis), ["ä" * each for each in everyone]),
    ):
        if got != wanted:
            wrong.append(f"{what}: {got} instead of {wanted}")


def stop(axis: Axis, device: torch.device, wrong: list[str]) -> None:
    """All ranks stop before the same part of some work."""
    asked = iter(range(1, PARTS + 1))
    flags = StopFlags(axis, device, lambda: next(asked) >= CANCELLED)
    done = 0
    while done < PARTS and flags.should_continue():
        done += 1
        flags.send_next()
    flags.finish()
    if done != CANCELLED - 1:
        wrong.append(f"stopped before part {done + 1} instead of {CANCELLED}")


KINDS: tuple[Kind, ...] = (
    exchange, all_to_all, ring, pipeline, all_gather, scatter_and_gather, broadcast, all_reduce, gather_weights, agree,
    stop,
)  # fmt: skip
