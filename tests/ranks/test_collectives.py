"""Exchanges staged through CPU memory, as gloo needs for GPU tensors, give the same results as direct ones.

There is no GPU here: the tests make CPU ranks believe that their tensors cannot be sent directly.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from parallel_backend.distributed import collectives, mesh
from parallel_backend.distributed.broadcast import broadcast_if_any
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.tensors import describe
from tests.ranks import driver, requests
from tests.ranks.requests import Case


@contextmanager
def staging(stage):
    """Force staging on or off for all exchanges; yield the addresses of the tensors that are exchanged."""
    addresses, exchange = set[int](), collectives._exchange

    def watched(sends, receives, axis):
        sends, receives = list(sends), list(receives)
        addresses.update(tensor.data_ptr() for _, tensor in (*sends, *receives))
        return exchange(sends, receives, axis)

    with (
        mock.patch.object(collectives, "staged", return_value=stage),
        mock.patch.object(collectives, "_exchange", watched),
    ):
        yield addresses


def exchanged(rank, stage):
    """Exchange parts of different sizes, some of them empty.

    Returns:
        What arrived; whether any of the caller's tensors was sent without a copy; whether anything was sent.
    """
    devices = driver.mesh(rank, "ulysses=3")
    outgoing = [[torch.full((rank + i,), 10.0 * rank + i), torch.full((2, i), float(rank))] for i in range(3)]
    incoming = [[torch.zeros(i + rank), torch.zeros(2, rank)] for i in range(3)]
    with staging(stage) as addresses:
        collectives.wait_all(collectives.start_exchange(outgoing, incoming, devices.axes["ulysses"]))
    local = {tensor.data_ptr() for parts in (*outgoing, *incoming) for tensor in parts if tensor.numel()}
    return [[tensor.tolist() for tensor in parts] for parts in incoming], bool(local & addresses), bool(addresses)


def test_staged_exchanges_deliver_the_same_values(pools):
    direct, copied = (pools(3).run(exchanged, stage) for stage in (False, True))
    for rank, ((wanted, sent_directly, _), (got, sent_original, any_sent)) in enumerate(
        zip(direct, copied, strict=True)
    ):
        assert got == wanted
        assert [values for values, _ in got] == [
            [10.0 * i + rank] * (i + rank) if i != rank else [0.0] * (2 * rank) for i in range(3)
        ]
        assert sent_directly
        assert any_sent
        assert not sent_original


def test_only_gpu_tensors_on_gloo_are_staged():
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
@pytest.mark.daily(2)
def test_layouts_give_the_same_result_through_staging(pools, checkpoints, ranks, layout):
    model = requests.spec(checkpoints(heads=3), layout)
    loop, start = requests.sample(model, Case())
    forward = Forward(model=model, branches=2, measure="bytes")
    for message, tensors in ((loop, start), (forward, Case().forward_inputs())):
        direct, copied = (pools(ranks).run(handled, message, tensors, stage) for stage in (False, True))
        assert [answer["error"] for answer in copied] == [None] * ranks
        wanted, got = direct[0]["tensors"], copied[0]["tensors"]
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted if name != "seconds")


GIVEN = {"0": torch.arange(5.0), "1": torch.tensor([7], dtype=torch.int64), "2": torch.zeros(0, 3)}


def broadcasted(rank, given):
    axis = driver.mesh(rank, "ulysses=3").all_ranks
    return broadcast_if_any(describe(GIVEN), given if rank == 0 else None, axis)


def test_every_rank_learns_what_the_first_has_and_that_it_has_nothing(pools):
    for given in (GIVEN, None, GIVEN):
        for got in pools(3).run(broadcasted, given):
            assert (got is None) == (given is None)
            assert given is None or all(torch.equal(got[name], tensor) for name, tensor in given.items())
