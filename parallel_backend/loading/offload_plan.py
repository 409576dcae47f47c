"""Which of a transformer's blocks stay on the device and which stream from the CPU's memory. All numbers are bytes.

A block that streams is on the device only while it computes and while the block before it does. Every rank decides from
the same numbers of all ranks, so ranks that hold the same part decide alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .room import Claim, check_fits, check_work, shortage, size

SLOTS = 2
"""Places on the device for blocks that stream: one computes while the next arrives."""

ALL = -1
"""Stands for the number of blocks that stay where all of them do."""
UNDECIDED = -2
"""Sent by a rank without weights and without an agreement."""

_SLACK = 4
"""Workspaces of kernels and fragments get this part of what the tensors take."""

_SHARE = (
    "let the ranks share the weights with tensor, pipe or shard_weights of Parallel Layout, on more devices if need be"
)
_SMALLER = "make a smaller or shorter latent"
_SPLIT = "split the work over more devices with ulysses, ring or cfg of Parallel Layout"


def with_slack(work: int) -> int:
    """Return the bytes to make room for, for tensors that take ``work`` at least."""
    return work + work // _SLACK


def streamed(blocks: int, resident: int) -> tuple[int, ...]:
    """Return the blocks that stream: spread evenly, so that each copy has blocks that stay to hide under."""
    count = 0 if resident == ALL else blocks - resident
    return tuple(i for i in range(blocks) if (i + 1) * count // blocks > i * count // blocks)


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """The bytes of a rank's part of a transformer.

    Attributes:
        whole: on the device if nothing streams, with what weight sharding gathers.
        outside: weights outside the blocks, which never stream.
        blocks: weights of each block, unsharded.
    """

    whole: int
    outside: int
    blocks: tuple[int, ...]

    def on_device(self, resident: int) -> int:
        """Return what the part takes on the device if ``resident`` of its blocks stay there."""
        if resident == ALL:
            return self.whole
        moved = streamed(len(self.blocks), resident)
        slots = SLOTS * max(self.blocks[i] for i in moved)
        return self.outside + sum(self.blocks) - self.in_cpu(resident) + slots

    def shared_by(self, ranks: int) -> int:
        """Return about what the part takes on the device if ranks share the weights of its blocks."""
        return self.outside + sum(self.blocks) // ranks + SLOTS * max(self.blocks)  # one computes, one arrives

    def in_cpu(self, resident: int) -> int:
        """Return what the part takes in the CPU's memory, once for all ranks that hold it."""
        return sum(self.blocks[i] for i in streamed(len(self.blocks), resident))


@dataclass(frozen=True, kw_only=True)
class TransformerClaim(Claim):
    """What a rank says about a request's transformer. ``needed`` is what it has to load if nothing streams.

    Attributes:
        whole: ``PartSizes.whole``.
        least: bytes on the device if all blocks stream.
        block: bytes of the largest block.
        blocks: number of blocks.
        work: bytes that the request's tensors take at least.
        resident: what the ranks of this part have agreed on: blocks that stay, ``ALL`` or ``UNDECIDED``.
        part: a number for the part, the same on all ranks that hold it.
        cpu_free: the machine's memory that processes can still use.
        experts: number of transformers with these numbers.
        cpu_idle: the machine's memory from which blocks of other models stream, as far as this rank has made it.
        cpu_own: the same of this model.
    """

    whole: int
    least: int
    block: int
    blocks: int
    work: int
    resident: int
    part: int
    cpu_free: int
    experts: int
    cpu_idle: int
    cpu_own: int

    def taken(self, resident: int) -> int:
        """Return about what the rank takes on its device if ``resident`` of its blocks stay there."""
        return self.whole if resident == ALL else self.least + resident * self.block

    def store(self, resident: int) -> int:
        """Return the bytes of the blocks that stream, at most."""
        return 0 if resident == ALL else self.block * (self.blocks - resident) * self.experts


def decide(claims: Sequence[TransformerClaim], name: str, dtype: torch.dtype, *, stream: bool = True) -> list[int]:
    """Return, for each rank, how many blocks stay on its device.

    Blocks stream only where a device has no room for all of them. What ranks have agreed on stays as long as it fits,
    since a change costs reading the weights again.

    Args:
        stream: whether anything may stream, or stay, that the ranks have not agreed on.

    Raises:
        InvalidRequest: the weights do not fit, not even streamed. Names numbers and remedies.
        NoRoom: weights and tensors together do not fit, or the weights do not and blocks may not stream.
    """
    agreed = [each.resident for each in claims]
    if _is_agreed(claims) and _fits(claims, [each.taken(each.resident) + each.work for each in claims]):
        return agreed
    if _fits(claims, [each.whole + with_slack(each.work) for each in claims]):
        most = [ALL] * len(claims)
    elif not stream:
        _refuse_work(claims, name, [each.whole for each in claims])
        most = [ALL] * len(claims)  # without any room to spare
    elif _fits(claims, [_least(each) + each.work for each in claims]) and any(map(_can_stream, claims)):
        most = [_most(claims, each) for each in claims]
    else:
        _refuse_weights(claims, name, dtype, [_least(each) for each in claims])
        _refuse_work(claims, name, [_least(each) for each in claims])
        most = [ALL] * len(claims)
    targets = [_target(claims, most, each.part) for each in claims]
    if targets != agreed:
        _check_cpu(claims, targets, name, dtype)
    return targets


def _is_agreed(claims: Sequence[TransformerClaim]) -> bool:
    """Whether all ranks that hold the same part have agreed on where it goes."""
    by_part = {(each.part, each.resident) for each in claims}
    return len(by_part) == len({each.part for each in claims}) and all(each.resident != UNDECIDED for each in claims)


def _fits(claims: Sequence[TransformerClaim], needed: Sequence[int]) -> bool:
    return shortage(_needing(claims, needed)) is None


def _can_stream(claim: TransformerClaim) -> bool:
    return claim.blocks > SLOTS and claim.least < claim.whole


def _least(claim: TransformerClaim) -> int:
    return claim.least if _can_stream(claim) else claim.whole


def _most(claims: Sequence[TransformerClaim], mine: TransformerClaim) -> int:
    """Return how many blocks may stay on a rank's device, which has room for ``_least``."""
    room = _share_of_device(claims, mine)
    if not _can_stream(mine) or mine.whole + with_slack(mine.work) <= room:
        return ALL
    count = max(0, room - with_slack(mine.work) - mine.least) // mine.block
    return min(count, mine.blocks - SLOTS - 1)


def _share_of_device(claims: Sequence[TransformerClaim], mine: TransformerClaim) -> int:
    """Return what a rank may use of what its device's ranks may use together, by what they need at least.

    Blocks that stream take the machine's memory, too, so CPU ranks keep more there only up to a limit of their own.
    """
    if mine.on_cpu:
        return mine.limit if mine.limit < mine.total else 0
    ranks = [each for each in claims if each.memory == mine.memory]
    together = min(each.free for each in ranks) + sum(each.freeable for each in ranks)
    needed = sum(_least(each) + each.work for each in ranks)
    return min(mine.limit, together * (_least(mine) + mine.work) // needed)


def _target(claims: Sequence[TransformerClaim], most: Sequence[int], part: int) -> int:
    """Return how many blocks stay on the ranks that hold a part."""
    ranks = [rank for rank, each in enumerate(claims) if each.part == part]
    limits = [most[rank] for rank in ranks if most[rank] != ALL]
    limit = min(limits, default=ALL)
    agreed = {claims[rank].resident for rank in ranks}
    kept = agreed.pop()
    return kept if not agreed and kept >= 0 and (limit == ALL or kept <= limit) else limit


def _refuse_weights(
    claims: Sequence[TransformerClaim], name: str, dtype: torch.dtype, sizes: Sequence[int], remedy: str = _SHARE
) -> None:
    """Refuse weights of these sizes, by rank, where they do not fit."""
    check_fits(_needing(claims, sizes), name, dtype=dtype, remedy=remedy)


def _refuse_work(claims: Sequence[TransformerClaim], name: str, sizes: Sequence[int], remedy: str = "") -> None:
    """Refuse a request where its tensors and weights of these sizes, by rank, do not fit together."""
    needed = [taken + each.work for each, taken in zip(claims, sizes, strict=True)]
    check_work(_needing(claims, needed), name, [_SMALLER, remedy or (_SHARE if len(claims) == 1 else _SPLIT)])


def _needing(claims: Sequence[TransformerClaim], sizes: Sequence[int]) -> list[TransformerClaim]:
    return [replace(each, needed=taken) for each, taken in zip(claims, sizes, strict=True)]


def lacks_cpu_memory(claims: Sequence[TransformerClaim], targets: Sequence[int]) -> bool:
    """Whether blocks can stream only from memory that other models stream from."""
    return any(missing > 0 for missing in _missing_cpu_memory(claims, targets, idle=False))


def _check_cpu(claims: Sequence[TransformerClaim], targets: list[int], name: str, dtype: torch.dtype) -> None:
    """Let nothing stream, or refuse, where a machine's memory has no room for the blocks that would stream from it."""
    missing = max(_missing_cpu_memory(claims, targets, idle=True))
    if missing > 0:
        remedy = f"make {size(missing)} of the machine's memory free, from which blocks could stream, {_SHARE}"
        whole = [each.whole for each in claims]
        _refuse_weights(claims, name, dtype, whole, remedy)
        _refuse_work(claims, name, whole, remedy)
        targets[:] = [ALL] * len(claims)


def _missing_cpu_memory(claims: Sequence[TransformerClaim], targets: Sequence[int], *, idle: bool) -> Iterator[int]:
    """Yield, for each machine, by how much the blocks that have to go there exceed its memory.

    Args:
        targets: how many blocks stay on each rank's device.
        idle: whether other models leave.
    """
    for host in dict.fromkeys(each.host for each in claims):
        on_host = [(each, target) for each, target in zip(claims, targets, strict=True) if each.host == host]
        changing = [(each, target) for each, target in on_host if target != each.resident]
        stores = {each.part: each.store(target) for each, target in changing}
        on_cpu = [(each, target) for each, target in on_host if each.on_cpu]
        needed = sum(stores.values()) + sum(each.taken(target) + each.work for each, target in on_cpu)
        freed = sum(each.cpu_own for each, _ in changing) + sum(each.cpu_idle for each, _ in on_host) * idle
        free = min(each.cpu_free for each, _ in on_host) + freed + sum(each.freeable for each, _ in on_cpu)
        yield needed - free if any(stores.values()) else 0
