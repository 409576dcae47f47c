"""The memory of a rank's device, and the refusal of weights for which it has no room. All numbers are bytes."""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from .. import processes
from ..distributed.collectives import gather_numbers
from ..distributed.mesh import Axis
from ..errors import InvalidRequest

_CPU = -1
"""Stands for the machine's memory where the index of a GPU is expected."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a device, as one rank sees it.

    Attributes:
        free: what the rank can use at once.
        freeable: what the rank uses itself, which is at least what it can free.
        total: the size of the memory.
    """

    free: int
    freeable: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Claim(Room):
    """What a rank is about to load, and the room for it.

    Attributes:
        needed: bytes that it loads; 0 if it has everything.
        device: index of its GPU, -1 for the machine's memory.
    """

    needed: int
    device: int


def room_on(device: torch.device) -> Room:
    """Measure the memory of a device. CPU ranks all see the same free memory."""
    if device.type == "cpu":
        available, total = processes.machine_memory()
        return Room(free=available, freeable=processes.resident_memory(os.getpid()), total=total)
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    kept = torch.cuda.memory_reserved(device) - used
    return Room(free=free + kept, freeable=used, total=total)


def claim(device: torch.device, needed: int) -> Claim:
    """Return this rank's claim to ``needed`` bytes. The memory is measured only if there are any."""
    room = room_on(device) if needed else Room(free=0, freeable=0, total=0)
    index = device.index if device.type == "cuda" else _CPU
    return Claim(free=room.free, freeable=room.freeable, total=room.total, needed=needed, device=index)


def claims_of_all(device: torch.device, needed: int, axis: Axis) -> list[Claim]:
    """Return the claim of every rank of the axis, of which this one's is ``needed`` bytes. Collective over the axis."""
    gathered = gather_numbers(astuple(claim(device, needed)), axis)
    return [
        Claim(free=free, freeable=freeable, total=total, needed=its_needed, device=its_device)
        for free, freeable, total, its_needed, its_device in gathered
    ]


def check_fits(claims: Sequence[Claim], weights: str, *, dtype: torch.dtype, remedy: str) -> None:
    """Refuse weights that do not fit on a device, even if the ranks there free everything that they hold.

    Ranks on one device, such as all CPU ranks, have its memory together. Ranks with the same claims decide alike.

    Args:
        claims: by rank.
        weights: name of what the ranks load.
        dtype: of the weights.
        remedy: what would work besides a smaller dtype, a smaller model, and an end of other programs.

    Raises:
        InvalidRequest: the message names the first such device and its ranks, the numbers, and what would work.
    """
    for device in dict.fromkeys(each.device for each in claims):
        by_rank = {rank: each for rank, each in enumerate(claims) if each.device == device and each.needed}
        needed = sum(each.needed for each in by_rank.values())
        freeable = sum(each.freeable for each in by_rank.values())
        total = max((each.total for each in by_rank.values()), default=0)
        room = min(min((each.free for each in by_rank.values()), default=0) + freeable, total)
        if needed > room:
            numbers = f"room for {room / 1e9:.1f} of {total / 1e9:.1f} GB"
            works = _remedies(remedy, dtype, others=needed <= total)
            raise InvalidRequest(f"{_sentence(tuple(by_rank), device, numbers, weights, needed)}: {works}")


def _sentence(ranks: tuple[int, ...], device: int, numbers: str, weights: str, needed: int) -> str:
    name = "cpu" if device == _CPU else f"cuda:{device}"
    size = f"{needed / 1e9:.1f} GB"
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({name}) has {numbers}, and its weights of {weights} take {size}"
    listed = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"ranks {listed} ({name}) have {numbers}, and their weights of {weights} take {size}"


def _remedies(remedy: str, dtype: torch.dtype, *, others: bool) -> str:
    """Join what would work. ``others`` says that ending other programs on the device would."""
    works = ["end other programs that use this memory"] if others else []
    works += [remedy, *(["choose dtype bf16"] if dtype.itemsize > 2 else []), "choose a smaller model"]
    return f"{', '.join(works[:-1])}, or {works[-1]}"
