"""Whether what the ranks have noted would work on GPUs: on one device, in a form that NCCL carries, in one order."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest
from typing import NamedTuple

import torch

from .deadlock import stuck
from .notes import Exchange, Notes, Part

CARRIED = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Types of numbers that NCCL has. It has no bool, which torch sends as a byte, and whose sums are of another kind."""


class Way(NamedTuple):
    """What has an order of its own: the messages of one rank to another in a group, by what carries them."""

    group: str
    on_gpu: bool
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"from rank {self.sender} to rank {self.receiver} in group {self.group}"


def faults(by_rank: Sequence[Notes], *, in_one_order: bool = True) -> list[str]:
    """Return what is wrong with what the ranks have noted, each fault once.

    Args:
        by_rank: what was noted.
        in_one_order: whether any two ranks must start what they exchange in the same order over all groups, too. NCCL
            promises progress without it only while a GPU has room for the kernels of all groups at once.
    """
    exchanges = [notes.exchanges for notes in by_rank]
    found = [f"rank {rank}: {text}" for rank, notes in enumerate(by_rank) for text in _alone(notes, rank)]
    found = found or [*_unmatched_messages(exchanges), *_unmatched_collectives(exchanges)]
    found = found or stuck(exchanges) or list(_unlike_orders(exchanges) if in_one_order else ())
    counted = Counter(found)
    return [text if count == 1 else f"{text} ({count} times)" for text, count in counted.items()]


def _alone(notes: Notes, rank: int) -> Iterator[str]:
    """What one rank does that GPUs would refuse."""
    yield from (f"mixed devices: {text}" for text in notes.mixed)
    for exchange in notes.exchanges:
        if exchange.devices not in ({"cpu"}, {f"cuda:{rank}"}):
            yield f"an exchange of tensors on {' and '.join(sorted(exchange.devices))} in {exchange.where}"
        for part in exchange.parts:
            if not part.contiguous:
                yield f"a {part.kind} that is not contiguous in {exchange.where}"
            if part.dtype not in CARRIED:
                yield f"a {part.kind} of {part.dtype} in {exchange.where}"


def _unmatched_messages(exchanges: Sequence[Sequence[Exchange]]) -> Iterator[str]:
    """The first message on each way that is not received as it is sent."""
    sent, received = (_messages(exchanges, kind) for kind in ("send", "receive"))
    for way in sorted(sent.keys() | received.keys()):
        pairs = zip_longest(sent[way], received[way], fillvalue="nothing")
        number, unlike = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None))
        if unlike:
            yield f"message {number} {way}: {unlike[0]} is sent, {unlike[1]} is expected"


def _messages(exchanges: Sequence[Sequence[Exchange]], kind: str) -> dict[Way, list[str]]:
    found: dict[Way, list[str]] = defaultdict(list)
    for rank, own in enumerate(exchanges):
        for exchange in own:
            for part in exchange.parts:
                if part.kind == kind:
                    ends = (rank, part.peer) if kind == "send" else (part.peer, rank)
                    found[Way(exchange.group, exchange.on_gpu, *ends)].append(_values(part))
    return found


def _unmatched_collectives(exchanges: Sequence[Sequence[Exchange]]) -> Iterator[str]:
    """The first collective of each group that is not the same on all of its ranks."""
    groups = {(each.group, each.on_gpu): each.ranks for own in exchanges for each in own}
    for (group, on_gpu), ranks in sorted(groups.items()):
        by_rank = [
            [
                " and ".join(f"{part.kind} of {_values(part)} by {part.peer}" for part in each.parts)
                for each in exchanges[rank]
                if (each.group, each.on_gpu) == (group, on_gpu) and not each.parts[0].is_message
            ]
            for rank in ranks
        ]
        for number, each in enumerate(zip_longest(*by_rank, fillvalue="nothing")):
            if len(set(each)) > 1:
                listed = ", ".join(f"{text} on rank {rank}" for rank, text in zip(ranks, each, strict=True))
                yield f"collective {number} in group {group}: {listed}"
                break


def _unlike_orders(exchanges: Sequence[Sequence[Exchange]]) -> Iterator[str]:
    """Two ranks that start exchanges with each other in different orders over their groups."""
    for one, other in combinations(range(len(exchanges)), 2):
        orders = [
            [each.group for each in exchanges[rank] if each.on_gpu and _meets(each, peer)]
            for rank, peer in ((one, other), (other, one))
        ]
        number = next((i for i, groups in enumerate(zip(*orders, strict=False)) if len(set(groups)) > 1), None)
        if number is not None:
            groups = " and ".join(order[number] for order in orders)
            yield f"exchange {number} of ranks {one} and {other} is in groups {groups}"


def _meets(exchange: Exchange, peer: int) -> bool:
    """Whether a rank takes part in the other side of an exchange."""
    if exchange.parts[0].is_message:
        return any(part.peer == peer for part in exchange.parts)
    return peer in exchange.ranks


def _values(part: Part) -> str:
    return f"{part.numel} of {part.dtype}"
