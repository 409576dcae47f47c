"""Blocks of a transformer whose weights are on the device only while they compute, and in the CPU's memory otherwise.

The next block is copied while the current one computes, as in FlexGen (https://arxiv.org/abs/2303.06865) and in
ComfyUI's and diffusers' offloading.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ..interfaces.family import Block, Family
from ..interfaces.state import State
from .cpu_store import CpuStore
from .offload_plan import SLOTS

_ALIGN = 256
"""Alignment in bytes of each weight, which kernels on GPUs expect."""


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A parameter of a block, and where it is among the block's bytes."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    offset: int

    def view(self, block: Tensor) -> Tensor:
        """Return the parameter's values in a block's bytes."""
        part = block[self.offset : self.offset + self.parameter.nbytes]
        return part.view(self.parameter.dtype).view(self.parameter.shape)


class Copies(Protocol):
    """Copies to the slots of a device."""

    ahead: bool
    """Whether a copy runs beside the device's work, so that starting it early saves time."""

    def start(self, slot: int, source: Tensor) -> None:
        """Start to copy a block's bytes into a slot, after everything that the device was given so far."""

    def wait(self, slot: int) -> None:
        """Let the device's further work wait for the copy into a slot."""


class CopiesAtOnce:
    """Copies on the CPU, whose cores are busy with the block that computes."""

    ahead = False

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots

    def start(self, slot: int, source: Tensor) -> None:
        self._slots[slot, : len(source)].copy_(source)

    def wait(self, slot: int) -> None:
        """The copy is there already."""


class CopiesBeside:
    """Copies to a GPU in a stream of their own."""

    ahead = True

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._stream = torch.cuda.Stream(slots.device)
        self._done = [torch.cuda.Event() for _ in slots]
        slots.record_stream(self._stream)

    def start(self, slot: int, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._slots.device))
        with torch.cuda.stream(self._stream):
            self._slots[slot, : len(source)].copy_(source, non_blocking=True)
        self._done[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        torch.cuda.current_stream(self._slots.device).wait_event(self._done[slot])


class StreamedBlocks:
    """The blocks of a transformer that stream, whose weights are parameters that lie in the slots.

    Args:
        family: this rank's part, on the meta device. ``place`` wraps its blocks.
        indices: which of its blocks with weights stream.
    """

    def __init__(self, family: Family, indices: Sequence[int]) -> None:
        self._family = family
        with_weights = [block for block in family.blocks if block.modules]
        self._blocks = [with_weights[i] for i in indices]
        names = {id(parameter): name for name, parameter in family.module.named_parameters()}
        stays = {id(parameter) for module in family.shared for parameter in module.parameters()}
        self._weights = [_weights(block, names, stays) for block in self._blocks]
        self._sizes = [_size(weights) for weights in self._weights]
        self._in_slot: list[int | None] = [None] * SLOTS
        self._version = -1
        self.homes: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the CPU's memory."""
        return sum(self._sizes)

    def place(self, store: CpuStore, device: torch.device, copies: Callable[[Tensor], Copies] | None = None) -> None:
        """Give the weights their places and let the blocks stream.

        Args:
            store: ``nbytes`` of the CPU's memory, where ``homes`` are from now on.
            device: where the blocks compute.
            copies: makes the copies to the slots, given ``[SLOTS, bytes of the largest block]`` on the device.
        """
        slots = torch.empty(SLOTS, max(self._sizes), dtype=torch.uint8, device=device)
        self._copies = (copies or (CopiesBeside if device.type == "cuda" else CopiesAtOnce))(slots)
        self._store, self._sources = store, store.data.split(self._sizes)
        for index, weights in enumerate(self._weights):
            for each in weights:
                self.homes[each.name] = each.view(self._sources[index])
                in_slot = nn.Parameter(each.view(slots[index % SLOTS]), requires_grad=False)
                setattr(each.module, each.attribute, in_slot)
        order = {id(block): index for index, block in enumerate(self._blocks)}
        self._family.blocks = [
            replace(block, run=self._streamed(order[id(block)], block)) if id(block) in order else block
            for block in self._family.blocks
        ]

    @property
    def contents(self) -> bytes:
        """What ``homes`` hold, see ``CpuStore``."""
        return self._store.contents

    def change(self, key: str, work: Callable[[bytes], None]) -> None:
        """Let ``homes`` hold other weights, see ``CpuStore``. What other ranks have changed is copied again, too."""
        self._store.change(key, work)
        if self._version != self._store.version:
            self._version = self._store.version
            self._in_slot = [None] * SLOTS

    def _streamed(self, index: int, block: Block) -> Callable[[State], State]:
        slot = index % SLOTS
        following = index + SLOTS if index + SLOTS < len(self._blocks) else slot

        def run(state: State) -> State:
            self._bring(index)
            self._copies.wait(slot)
            if self._copies.ahead and index + 1 < len(self._blocks):
                self._bring(index + 1)  # it is there already, but for the first run and after skipped blocks
            result = block.run(state)
            if self._copies.ahead:
                self._bring(following)
            return result

        return run

    def _bring(self, index: int) -> None:
        """Start to copy a block into its slot, unless it is there."""
        slot = index % SLOTS
        if self._in_slot[slot] != index:
            self._in_slot[slot] = None
            self._copies.start(slot, self._sources[index])
            self._in_slot[slot] = index


def streamable(block: Block, family: Family) -> int:
    """Return the bytes of a block's weights that can stream: no other block uses them."""
    stays = {id(parameter) for module in family.shared for parameter in module.parameters()}
    return _size(_weights(block, {}, stays))


def _weights(block: Block, names: dict[int, str], stays: set[int]) -> list[_Weight]:
    weights: list[_Weight] = []
    seen = set(stays)
    for part in (part for module in block.modules for part in module.modules()):
        for attribute, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            offset, name = _size(weights), names.get(id(parameter), "")
            weights.append(_Weight(name=name, module=part, attribute=attribute, parameter=parameter, offset=offset))
    return weights


def _size(weights: Sequence[_Weight]) -> int:
    """Return the bytes of a block with these weights."""
    return -(-(weights[-1].offset + weights[-1].parameter.nbytes) // _ALIGN) * _ALIGN if weights else 0
