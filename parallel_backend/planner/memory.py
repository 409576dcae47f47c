"""What a layout takes on each device, by the estimates with which the ranks decide before they load."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine.working_memory import forward_bytes
from ..errors import InvalidRequest, NoRoom
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..loading.offload_plan import ALL, UNDECIDED, PartSizes, TransformerClaim, decide, streamed, with_slack
from ..loading.room import size
from ..strategies.stage_cut import cut
from .hardware.description import Hardware
from .request import Prompt


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the ranks take.

    Attributes:
        weights: bytes of the busiest rank's part, as it stays on the device.
        work: bytes of its tensors.
        streams: bytes that reach its device in each forward from the machine's memory.
        refusal: why the request does not fit, not even so; "" if it does.
    """

    weights: int
    work: int
    streams: int = 0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether it works."""
        return not self.refusal

    @property
    def taken(self) -> int:
        """Bytes of weights and tensors."""
        return self.weights + self.work

    @property
    def whole(self) -> bool:
        """Whether it works without blocks that stream."""
        return self.fits and not self.streams


def taken(sizes: PartSizes, layout: ParallelLayout, rank: int) -> int:
    """Return about what a rank holds of the weights."""
    if layout.shard_weights:
        return sizes.shared_by(layout.sequence)
    place = layout.coordinates(rank)
    if layout.pipe > 1:
        return sizes.outside + stages(sizes, Split.of(layout).stages)[place["pipe"]]
    return sizes.outside + int(sum(sizes.blocks) * Split.of(layout).cut_share(place["tensor"]))


def work_bytes(prompt: Prompt, layout: ParallelLayout) -> list[int]:
    """Return the bytes of each rank's tensors."""
    name, plan, itemsize = prompt.model.class_name, prompt.plan(layout), prompt.dtype.itemsize
    return [forward_bytes(name, plan, rank, itemsize) for rank in range(layout.ranks)]


def stages(sizes: PartSizes, speeds: Sequence[float]) -> list[int]:
    """Return about what each stage holds of the blocks, if they are cut by these speeds."""
    by_stage, begin = [], 0
    for count in cut([float(block) for block in sizes.blocks], speeds).sizes:
        by_stage.append(sum(sizes.blocks[begin : begin + count]))
        begin += count
    return by_stage


def room(prompt: Prompt, layout: ParallelLayout, hardware: Hardware, sizes: PartSizes) -> Room:
    """Return what a layout takes, and whether it fits."""
    works = work_bytes(prompt, layout)
    parts = [taken(sizes, layout, rank) for rank in range(layout.ranks)]
    needs = [part + with_slack(work) for part, work in zip(parts, works, strict=True)]
    weights, work, devices = max(parts), max(works), hardware.devices[: layout.ranks]
    lacking = [need - device.memory for need, device in zip(needs, devices, strict=True)]
    if max(lacking) <= 0:
        return Room(weights=weights, work=work)
    if layout.splits_weights:
        worst = lacking.index(max(lacking))
        needed, least = size(needs[worst]), devices[worst]
        return Room(
            weights=weights, work=work,
            refusal=f"weights and tensors take {needed} of a device, and {least.name} has {size(int(least.memory))}",
        )  # fmt: skip
    return _streaming(prompt, hardware, sizes, layout, work)


def _streaming(prompt: Prompt, hardware: Hardware, sizes: PartSizes, layout: ParallelLayout, work: int) -> Room:
    claims = [_claim(sizes, work, hardware, rank, prompt.model.experts) for rank in range(layout.ranks)]
    try:
        decided = decide(claims, prompt.model.name, torch.bfloat16)
    except (InvalidRequest, NoRoom) as refusal:
        return Room(weights=sizes.whole, work=work, refusal=str(refusal))
    if set(decided) == {ALL}:
        return Room(weights=sizes.whole, work=work)
    resident = min(each for each in decided if each != ALL)
    moved = sum(sizes.blocks[i] for i in streamed(len(sizes.blocks), resident))
    return Room(weights=sizes.on_device(resident), work=work, streams=moved)


def _claim(sizes: PartSizes, work: int, hardware: Hardware, rank: int, experts: int) -> TransformerClaim:
    memory = int(hardware.devices[rank].memory)
    return TransformerClaim(
        free=memory, freeable=0, total=memory, limit=memory, needed=sizes.whole, device=rank, whole=sizes.whole,
        least=sizes.on_device(0) if len(sizes.blocks) else sizes.whole, block=max(sizes.blocks, default=0),
        blocks=len(sizes.blocks), work=work, resident=UNDECIDED, part=0, cpu_free=int(hardware.host_memory),
        experts=experts, cpu_idle=0, cpu_own=0,
    )  # fmt: skip
