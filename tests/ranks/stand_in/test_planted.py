"""Faults that are planted into the ranks' code are found on stand-in GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel_backend.distributed import collectives
from parallel_backend.families.wan.transformer import Wan
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.strategies import ring, token_split
from tests.support.stand_in import ranks
from tests.support.stand_in.agreement import faults


@contextmanager
def table_on_the_cpu(rank: int) -> Iterator[None]:
    """The rotary table stays on the CPU."""
    embed = Wan.embed

    def planted(family, inputs):
        state = embed(family, inputs)
        tables = {key: table.cpu() for key, table in state.tables[IMAGE].items()}
        return replace(state, tables={**state.tables, IMAGE: tables})

    with mock.patch.object(Wan, "embed", planted):
        yield


@contextmanager
def wrong_gpu(rank: int) -> Iterator[None]:
    """A buffer is always on the first GPU."""
    with mock.patch.object(token_split, "all_gather", _before(lambda axis: torch.zeros(2, device="cuda:0") + 1)):
        yield


@contextmanager
def strided_send(rank: int) -> Iterator[None]:
    """The ring sends keys and values as they lie among others."""

    def strided(tensor):
        return torch.stack([tensor, tensor], dim=-1).transpose(1, 2)[..., 0]

    with mock.patch.object(ring, "_token_major", strided):
        yield


@contextmanager
def bool_send(rank: int) -> Iterator[None]:
    """A mask is sent as it is."""

    def send_mask(axis):
        mask = torch.ones(3, dtype=torch.bool, device="cuda")
        collectives.all_gather(mask, [(3,)] * axis.size, axis)

    with mock.patch.object(token_split, "all_gather", _before(send_mask)):
        yield


@contextmanager
def other_order(rank: int) -> Iterator[None]:
    """One rank takes two messages in another order than they are sent."""

    def two(axis):
        pair = [torch.ones(3, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.int32)]
        for tensor in reversed(pair) if axis.index == 1 else pair:
            collectives.all_gather(tensor, [(3,)] * axis.size, axis)

    with mock.patch.object(token_split, "all_gather", _before(two)):
        yield


@contextmanager
def sends_first(rank: int) -> Iterator[None]:
    """All ranks start their sends before their receives, and not at once with them."""

    def unbatched(sends, receives, axis):
        batches = [
            [dist.P2POp(op, tensor, axis.ranks[i], group=axis.group) for i, tensor in tensors]
            for op, tensors in ((dist.isend, sends), (dist.irecv, receives))
        ]
        return [work for ops in batches if ops for work in dist.batch_isend_irecv(ops)]

    with mock.patch.object(collectives, "_exchange", unbatched):
        yield


def _before(extra):
    """Return ``all_gather`` with something done before it."""

    def planted(local, shapes, axis):
        extra(axis)
        return collectives.all_gather(local, shapes, axis)

    return planted


PLANTS = {
    "table on the CPU": table_on_the_cpu,
    "wrong GPU": wrong_gpu,
    "strided send": strided_send,
    "bool send": bool_send,
    "other order": other_order,
    "sends first": sends_first,
}


def handle(rank, plant, message, tensors):
    """Handle a request with a fault, which gloo may refuse, too."""
    with PLANTS[plant](rank):
        try:
            return ranks.handle(rank, message, tensors).notes
        except RuntimeError:
            return ranks.gpu_and_engine(rank)[0].recorder.notes


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("table on the CPU", "mixed devices: aten.mul.Tensor on cuda:0"),
        ("wrong GPU", "rank 1: mixed devices: aten.add.Tensor on cuda:0 [2]"),
        ("strided send", "a send that is not contiguous in parallel_backend/distributed/collectives.py"),
        ("bool send", "a send of torch.bool in parallel_backend/distributed/collectives.py"),
        ("other order", "3 of torch.float32 is sent, 3 of torch.int32 is expected"),
        ("sends first", "rank 0 never ends send with 1 in group"),
    ],
)
def test_faults_are_found(gpus, small, plant, found):
    listed = faults(gpus.run(handle, plant, *small("wan").loop("ring=3")))
    assert any(found in fault for fault in listed), listed


def reading(rank, message, tensors):
    """Handle a request in which each prediction reads a number."""
    head = Wan.head

    def planted(family, state):
        state.streams[IMAGE].sum().item()
        return head(family, state)

    with mock.patch.object(Wan, "head", planted):
        return ranks.handle(rank, message, tensors)


def test_waits_are_noted(gpus, small):
    request = small("wan").loop("")
    before, after = (
        [str(wait) for wait in gpus.run(each, *request)[0].notes.waits] for each in (ranks.handle, reading)
    )
    more = [wait for wait in after if wait not in before]
    assert more
    assert all("reads a number (aten._local_scalar_dense.default)" in wait for wait in more)
