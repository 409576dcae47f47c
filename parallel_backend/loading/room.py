"""The memory of a rank's device, and the refusal of weights for which it has no room. All numbers are bytes."""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import TypeVar

import torch

from .. import env, processes
from ..distributed.collectives import gather_numbers
from ..distributed.mesh import Axis
from ..errors import InvalidRequest, NoRoom
from .cpu_store import machine_number

_CPU = -1
"""Stands for the machine's memory where the index of a GPU is expected."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a device, as one rank sees it.

    Attributes:
        free: what the rank can use at once.
        freeable: what the rank uses itself, which is at least what it can free.
        total: the size of the memory.
        limit: what the rank may use of it: ``env.MEMORY_LIMIT``, or all of it.
    """

    free: int
    freeable: int
    total: int
    limit: int

    @property
    def left(self) -> int:
        """What the rank may use at once, by the limit and the device."""
        return min(self.free, self.limit - self.freeable)

    @property
    def most(self) -> int:
        """What the rank may use if it frees all that it holds."""
        return min(self.free + self.freeable, self.limit)

    def lacks(self, nbytes: int, sharers: int = 1) -> bool:
        """Whether ``nbytes`` are not free, for each of ``sharers`` ranks that take them from the same memory."""
        return nbytes > self.left or nbytes * sharers > self.free


@dataclass(frozen=True, kw_only=True)
class Claim(Room):
    """What a rank is about to load, and the room for it.

    Attributes:
        needed: bytes that it loads; 0 if it has everything.
        device: index of its GPU, -1 for the machine's memory.
        host: a number for the machine.
    """

    needed: int
    device: int
    host: int = 0

    @property
    def on_cpu(self) -> bool:
        """Whether it is the machine's memory that the rank claims."""
        return self.device == _CPU

    @property
    def memory(self) -> tuple[int, int]:
        """Identifies the memory pool."""
        return self.host, self.device


C = TypeVar("C", bound=Claim)


def memory_limit(total: int) -> int:
    """Return the bytes that a rank may use of a memory of ``total`` bytes.

    Raises:
        InvalidRequest: ``env.MEMORY_LIMIT`` is not a size.
    """
    return min(env.MEMORY_LIMIT.get() or total, total)


def room_on(device: torch.device, held: int) -> Room:
    """Measure the memory of a device. CPU ranks all see the same free memory.

    Args:
        held: what this rank's loaded weights take. On a GPU, torch's own count replaces it.
    """
    if device.type == "cpu":
        available, total = processes.machine_memory()
        return Room(free=available, freeable=held, total=total, limit=memory_limit(total))
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    kept = torch.cuda.memory_reserved(device) - used
    return Room(free=free + kept, freeable=used, total=total, limit=memory_limit(total))


def claim(device: torch.device, room: Room, needed: int) -> Claim:
    """Return the claim to ``needed`` bytes of a rank that has this room."""
    index = device.index if device.type == "cuda" else _CPU
    return Claim(**asdict(room), needed=needed, device=index, host=machine_number())


def claims_of_all(axis: Axis, mine: C) -> list[C]:
    """Return the claims of every rank of the axis, by rank, in one exchange."""
    names = [each.name for each in fields(mine)]
    gathered = gather_numbers(astuple(mine), axis)
    return [type(mine)(**dict(zip(names, numbers, strict=True))) for numbers in gathered]


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Ranks that need more than they may use, even if they free everything that they hold.

    Attributes:
        ranks: the ranks.
        device: index of their GPU, -1 for the machine's memory.
        needed: bytes that they need together.
        room: bytes that they may use.
        total: the size of the memory.
        limited: whether it is ``env.MEMORY_LIMIT`` that is too small for one rank.
    """

    ranks: tuple[int, ...]
    device: int
    needed: int
    room: int
    total: int
    limited: bool

    def sentence(self, what: str, take: str) -> str:
        """Return the numbers in words. ``what`` is the subject of the sentence, and ``take`` its verb."""
        name = "cpu" if self.device == _CPU else f"cuda:{self.device}"
        numbers = f"room for {self.room / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        if self.limited:
            numbers = f"room for {size(self.room)} by {env.MEMORY_LIMIT}"
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} ({name}) has {numbers}, and its {what} {take} {size(self.needed)}"
        listed = f"{', '.join(map(str, self.ranks[:-1]))} and {self.ranks[-1]}"
        return f"ranks {listed} ({name}) have {numbers}, and their {what} {take} {size(self.needed)}"

    @property
    def remedies(self) -> list[str]:
        """What would make more room for these ranks."""
        if self.limited:
            return [f"raise {env.MEMORY_LIMIT}"]
        return ["end other programs that use this memory"] if self.needed <= self.total else []


def shortage(claims: Sequence[Claim]) -> Shortage | None:
    """Return the first limit that the claims, by rank, exceed: one rank's, or a memory that several share."""
    for rank, each in enumerate(claims):
        if each.needed and each.limit < each.total and each.needed > each.limit:
            return Shortage(
                ranks=(rank,), device=each.device, needed=each.needed, room=each.limit, total=each.total, limited=True
            )
    for memory in dict.fromkeys(each.memory for each in claims):
        by_rank = {rank: each for rank, each in enumerate(claims) if each.memory == memory and each.needed}
        needed = sum(each.needed for each in by_rank.values())
        freeable = sum(each.freeable for each in by_rank.values())
        total = max((each.total for each in by_rank.values()), default=0)
        room = min(min((each.free for each in by_rank.values()), default=0) + freeable, total)
        if needed > room:
            device = memory[1]
            return Shortage(ranks=tuple(by_rank), device=device, needed=needed, room=room, total=total, limited=False)
    return None


def check_fits(claims: Sequence[Claim], weights: str, *, dtype: torch.dtype, remedy: str) -> None:
    """Refuse weights that do not fit, even if the ranks free everything that they hold.

    Args:
        remedy: what would work besides more room, a smaller dtype and a smaller model.

    Raises:
        InvalidRequest: the message names the ranks, the numbers, and what would work.
    """
    found = shortage(claims)
    if found:
        smaller = ["choose dtype bf16"] if dtype.itemsize > 2 else []
        works = either([*found.remedies, remedy, *smaller, "choose a smaller model"])
        raise InvalidRequest(f"{found.sentence(f'weights of {weights}', 'take')}: {works}")


def check_work(claims: Sequence[Claim], weights: str, works: Sequence[str]) -> None:
    """Refuse a request whose weights and tensors together do not fit, even if the ranks free all else.

    Args:
        works: what would work besides more room.

    Raises:
        NoRoom: the message names the ranks, the numbers, and what would work.
    """
    found = shortage(claims)
    if found:
        sentence = found.sentence(f"weights of {weights} and the tensors of this request", "take at least")
        raise NoRoom(f"{sentence}: {either([*found.remedies, *works])}")


def either(works: Sequence[str]) -> str:
    """Join at least two things that would work."""
    return f"{', '.join(works[:-1])}, or {works[-1]}"


def size(nbytes: int) -> str:
    """Return a number of bytes in words."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"
