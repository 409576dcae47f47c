"""Exchanges through copies in the CPU's memory, as gloo needs them for a GPU's tensors, are the direct ones.

There is no GPU here: ranks on the CPU are told that their tensors cannot be sent from where they lie.
"""

from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch

from parallel_backend.distributed import collectives, mesh
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from tests.ranks import driver, requests
from tests.ranks.requests import Case


@contextmanager
def staging(stage):
    """Decide for all exchanges whether copies are exchanged; gives the addresses of what really is."""
    passed, exchange = set[int](), collectives._exchange

    def watched(sent, received, axis):
        sent, received = list(sent), list(received)
        passed.update(tensor.data_ptr() for _, tensor in (*sent, *received))
        return exchange(sent, received, axis)

    with (
        mock.patch.object(collectives, "staged", return_value=stage),
        mock.patch.object(collectives, "_exchange", watched),
    ):
        yield passed


def exchanged(rank, stage):
    """What arrives of uneven parts, some of them empty, and whether the ranks' own tensors were exchanged."""
    devices = mesh.create(ParallelLayout(ulysses=3), rank=rank, timeout=timedelta(seconds=30))
    assert devices
    leaving = [[torch.full((rank + i,), 10.0 * rank + i), torch.full((2, i), float(rank))] for i in range(3)]
    arriving = [[torch.zeros(i + rank), torch.zeros(2, rank)] for i in range(3)]
    with staging(stage) as passed:
        collectives.wait(collectives.start(leaving, arriving, devices.axes["ulysses"]))
    devices.free()
    own = {tensor.data_ptr() for parts in (*leaving, *arriving) for tensor in parts if tensor.numel()}
    return [[tensor.tolist() for tensor in parts] for parts in arriving], bool(own & passed), bool(passed)


def test_copies_arrive_where_tensors_would(pools):
    direct, copied = (pools(3).run(exchanged, stage) for stage in (False, True))
    for rank, ((wanted, by_itself, _), (got, touched, passed)) in enumerate(zip(direct, copied, strict=True)):
        assert got == wanted
        assert [values for values, _ in got] == [
            [10.0 * i + rank] * (i + rank) if i != rank else [0.0] * (2 * rank) for i in range(3)
        ]
        assert by_itself
        assert passed
        assert not touched


def test_a_group_says_whether_its_tensors_are_copied():
    whole = mesh.Axis(name="mesh", ranks=(0, 1), index=0, group=None, gloo=True)
    on_gpu = mock.Mock(is_cuda=True)
    assert collectives.staged(whole, on_gpu)
    assert not collectives.staged(whole, torch.zeros(1))
    assert not collectives.staged(mesh.Axis(name="mesh", ranks=(0, 1), index=0, group=None, gloo=False), on_gpu)


def handled(rank, message, tensors, stage):
    with staging(stage):
        return driver.handle(rank, message, tensors)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(3, "ulysses=3"), (3, "ring=3"), (4, "ring=2 ulysses=2"), (2, "cfg=2"), (3, "data=3"), (4, "cfg=2 ring=2")],
)
def test_a_layout_gives_the_same_through_copies(pools, checkpoints, ranks, layout):
    model = requests.spec(checkpoints(heads=3), layout)
    loop, start = requests.sample(model, Case())
    forward = Forward(model=model, branches=2, measure=True)
    for message, tensors in ((loop, start), (forward, Case().forward_inputs())):
        direct, copied = (pools(ranks).run(handled, message, tensors, stage) for stage in (False, True))
        assert [answer["error"] for answer in copied] == [None] * ranks
        wanted, got = direct[0]["tensors"], copied[0]["tensors"]
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted if name != "seconds")
