"""Blocks that stream: what computes is always there, whenever the device gets to it."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.interfaces.family import Block
from parallel_backend.loading.cpu_store import BROKEN, CpuStore, contents_of, share
from parallel_backend.loading.offload_plan import SLOTS
from parallel_backend.loading.partial import allocate
from parallel_backend.loading.streamed_blocks import StreamedBlocks
from tests.unit.loading.test_loading import ALONE

CPU = torch.device("cpu")
WIDTHS = (3, 5, 4, 7, 2)


class Blocks:
    """As much of a family as streams: a linear layer outside, and blocks whose states are tensors."""

    def __init__(self, compute: Callable[[nn.Module, Any], Any]) -> None:
        self.module = nn.Module()
        self.module.outside = nn.Linear(2, 2, device="meta")
        self.module.layers = nn.ModuleList(nn.Linear(6, width, device="meta") for width in WIDTHS)
        self.shared: list[nn.Module] = []
        self.blocks = [Block(run=partial(compute, layer), modules=(layer,)) for layer in self.module.layers]

    def run(self, state: Any, skipped: tuple[int, ...] = ()) -> Any:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                state = block.run(state)
        return state


class LateDevice:
    """Copies and computations that wait in two queues, as streams of a GPU do, and run as late as they may."""

    ahead = True

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self.computing: list[Callable[[], None]] = []
        self.copying: list[tuple[int, Callable[[], None]]] = []
        self.started = 0

    def start(self, slot: int, source: Tensor) -> None:
        computed_before = len(self.computing)
        self.started += 1

        def copy() -> None:
            self.compute(computed_before)
            self.slots[slot, : len(source)].copy_(source)

        self.copying.append((slot, copy))

    def wait(self, slot: int) -> None:
        last = max((i for i, (other, _) in enumerate(self.copying) if other == slot), default=-1)
        self.computing.append(lambda: self.copy(last + 1))

    def compute(self, count: int) -> None:
        for i in range(count):
            work, self.computing[i] = self.computing[i], lambda: None
            work()

    def copy(self, count: int) -> None:
        for i in range(count):
            (_, work), self.copying[i] = self.copying[i], (-1, lambda: None)
            work()


def late(devices, slots):
    """A device with these slots, which is kept for the test."""
    devices.append(LateDevice(slots))
    return devices[-1]


def streaming(indices, compute, copies=None):
    """Blocks of which some stream, with the store that holds their weights: each block's are its number."""
    family: Any = Blocks(compute)
    streamed = StreamedBlocks(family, indices)
    store = share(streamed.nbytes, 0, CPU, ALONE.all_ranks)
    assert store is not None
    streamed.place(store, CPU, copies)
    allocate(family.module, CPU)
    for name, parameter in family.module.named_parameters():
        number = int(name.split(".")[1]) if name.startswith("layers") else -1
        streamed.homes.get(name, parameter).data.fill_(number)
    return family, streamed


@pytest.mark.parametrize("indices", [(0, 1, 2, 3, 4), (0, 2, 3), (1, 2, 3, 4), (4,)])
@pytest.mark.parametrize("skipped", [(), (1,), (0, 3), (2, 3, 4)])
def test_every_block_computes_with_its_own_weights(indices, skipped):
    devices: list[LateDevice] = []
    seen: list[float] = []

    def compute(layer, state):
        device = devices[0]
        device.computing.append(lambda: seen.append(float(layer.weight.detach().mean())))
        return state

    family, _ = streaming(indices, compute, partial(late, devices))
    for _ in range(3):
        family.run(None, skipped)
    devices[0].compute(len(devices[0].computing))
    assert seen == 3 * [i for i in range(len(WIDTHS)) if i not in skipped]


def test_the_next_block_is_on_its_way_while_one_computes():
    started: list[int] = []
    devices: list[LateDevice] = []

    def compute(layer, state):
        started.append(devices[0].started)
        return state

    family, _ = streaming(range(5), compute, partial(late, devices))
    family.run(None)
    family.run(None)
    assert started == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11], "the next block is on its way while one computes"


def test_on_the_cpu_each_block_is_copied_once_a_run():
    family, _ = streaming(range(5), lambda layer, state: [*state, float(layer.weight.detach().mean())])
    assert family.run([]) == [0, 1, 2, 3, 4]
    slots = {parameter.untyped_storage().data_ptr() for parameter in family.module.layers.parameters()}
    assert len(slots) == 1, "all weights lie in the slots"
    (held,) = {parameter.untyped_storage().nbytes() for parameter in family.module.layers.parameters()}
    assert held == SLOTS * 512


def test_changed_weights_are_copied_again():
    family, streamed = streaming((4,), lambda layer, state: [*state, float(layer.weight.detach().mean())])
    assert family.run([])[4] == 4
    for held, changed, key in ((4, 9, "one"), (9, 7, "another")):
        streamed.homes["layers.4.weight"].fill_(changed)
        assert family.run([])[4] == held, "nobody said that it changed"
        streamed.change(key, lambda before: None)
        assert family.run([])[4] == changed


def test_weights_that_other_parts_need_stay():
    family: Any = Blocks(lambda layer, state: state)
    shared = nn.Linear(3, 3, device="meta")
    family.module.layers[2].shared = shared
    family.shared = [shared]
    streamed = StreamedBlocks(family, (1, 2))
    store = share(streamed.nbytes, 0, CPU, ALONE.all_ranks)
    assert store is not None
    streamed.place(store, CPU)
    assert set(streamed.homes) == {f"layers.{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert shared.weight.is_meta


def test_a_store_is_filled_once():
    store = share(64, 0, CPU, ALONE.all_ranks)
    assert store is not None
    other = CpuStore(os.open(f"/proc/self/fd/{store.descriptor}", os.O_RDWR), 64, CPU)
    filled: list[str] = []

    def fill(name: str, failing: bool = False) -> None:
        filled.append(name)
        if failing:
            raise OSError("unreadable")
        store.data.fill_(7)

    with pytest.raises(OSError, match="unreadable"):
        store.fill(lambda: fill("fails", failing=True))
    other.fill(lambda: fill("first"))
    store.fill(lambda: fill("second"))
    assert filled == ["fails", "first"]
    assert other.data.tolist() == [7] * 64


def test_changed_contents_are_written_once_and_again_after_an_error():
    store = share(64, 0, CPU, ALONE.all_ranks)
    assert store is not None
    other = CpuStore(os.open(f"/proc/self/fd/{store.descriptor}", os.O_RDWR), 64, CPU)
    store.fill(lambda: None)
    seen: list[bytes] = []
    store.change("a", seen.append)
    other.change("a", seen.append)
    assert (seen, other.version) == ([contents_of("")], 3)
    with pytest.raises(OSError, match="unreadable"):
        other.change("b", Mock(side_effect=OSError("unreadable")))
    store.change("a", seen.append)
    other.change("", seen.append)
    assert seen == [contents_of(""), BROKEN, contents_of("a")]


def test_a_rank_waits_while_another_one_fills():
    store = share(64, 0, CPU, ALONE.all_ranks)
    assert store is not None
    other = CpuStore(os.open(f"/proc/self/fd/{store.descriptor}", os.O_RDWR), 64, CPU)
    order: list[str] = []

    def wait() -> None:
        other.fill(lambda: order.append("twice"))
        order.append("waited")

    waiting = threading.Thread(target=wait)

    def fill() -> None:
        waiting.start()
        time.sleep(0.2)
        order.append("filled")

    store.fill(fill)
    waiting.join(10)
    assert order == ["filled", "waited"]


def test_no_memory_is_made_for_a_rank_that_needs_none():
    assert share(0, 0, CPU, ALONE.all_ranks) is None
