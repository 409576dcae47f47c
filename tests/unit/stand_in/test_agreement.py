"""Which exchanges of several ranks match and end."""

from dataclasses import replace

import pytest
import torch

from tests.support.stand_in.agreement import faults
from tests.support.stand_in.notes import Exchange, Notes, Part


def part(kind, peer=-1, numel=4, dtype=torch.float32, **options):
    return Part(kind=kind, peer=peer, numel=numel, dtype=dtype, **{"contiguous": True} | options)


def exchange(rank, *parts, group="1", after=(), device="cuda:{}"):
    return Exchange(
        group=group, ranks=(0, 1), devices=frozenset({device.format(rank)}), parts=parts, after=frozenset(after),
        where="a line",
    )  # fmt: skip


def send(rank, **options):
    return exchange(rank, part("send", 1 - rank, **options))


def receive(rank, **options):
    return exchange(rank, part("receive", 1 - rank, **options))


def both(rank):
    return exchange(rank, part("send", 1 - rank), part("receive", 1 - rank))


def summed(rank, **options):
    return exchange(rank, part("all_reduce", **options))


def on(each, *devices):
    return replace(each, devices=frozenset(devices))


def found(*by_rank):
    return faults([Notes(exchanges=list(exchanges)) for exchanges in by_rank])


def test_matching_exchanges_have_no_faults():
    assert found([both(0), summed(0), send(0)], [both(1), summed(1), receive(1)]) == []


@pytest.mark.parametrize(
    ("exchanges", "fault"),
    [
        (([send(0)], [receive(1, numel=5)]), "4 of torch.float32 is sent, 5 of torch.float32 is expected"),
        (([send(0)], [receive(1, dtype=torch.int32)]), "4 of torch.float32 is sent, 4 of torch.int32 is expected"),
        (([send(0), send(0)], [receive(1)]), "message 1 from rank 0 to rank 1 in group 1: 4 of torch.float32 is sent"),
        (([], [receive(1)]), "message 0 from rank 0 to rank 1 in group 1: nothing is sent"),
        (([send(0)], [replace(receive(1), group="2")]), "in group 2: nothing is sent"),
        (([summed(0)], []), "collective 0 in group 1: all_reduce of 4 of torch.float32 by -1 on rank 0"),
        (([summed(0)], [summed(1, numel=5)]), "all_reduce of 5 of torch.float32 by -1 on rank 1"),
        (([exchange(0, part("broadcast", 0))], [exchange(1, part("broadcast", 1))]), "collective 0 in group 1"),
        (([send(0, contiguous=False)], [receive(1)]), "rank 0: a send that is not contiguous in a line"),
        (([send(0, dtype=torch.bool)], [receive(1, dtype=torch.bool)]), "rank 0: a send of torch.bool in a line"),
        (([both(0)], [on(both(1), "cpu", "cuda:1")]), "rank 1: an exchange of tensors on cpu and cuda:1"),
        (([both(0)], [on(both(1), "cuda:0")]), "rank 1: an exchange of tensors on cuda:0"),
    ],
)  # fmt: skip
def test_what_differs_is_told(exchanges, fault):
    listed = found(*exchanges)
    assert any(fault in each for each in listed), listed


def test_a_message_on_the_cpu_does_not_match_one_on_gpus():
    listed = found([send(0)], [on(receive(1), "cpu")])
    assert any("nothing is expected" in each for each in listed)


@pytest.mark.parametrize(
    ("exchanges", "ends"),
    [
        (([send(0), receive(0)], [send(1), receive(1)]), False),  # each waits for the other to receive
        (([send(0), receive(0)], [receive(1), send(1)]), True),
        (([both(0)], [send(1), receive(1)]), True),
        (([summed(0), send(0)], [receive(1), summed(1)]), False),  # a communicator runs one after another
        (([summed(0), replace(send(0), group="2")], [replace(receive(1), group="2"), summed(1)]), True),
        (
            ([summed(0), replace(send(0), group="2", after=frozenset({0}))],
             [replace(receive(1), group="2"), replace(summed(1), after=frozenset({0}))]),
            False,
        ),  # waits for another communicator
    ],
)  # fmt: skip
def test_what_never_ends(exchanges, ends):
    listed = faults([Notes(exchanges=list(own)) for own in exchanges], in_one_order=False)
    assert [each.startswith(f"rank {rank} never ends") for rank, each in enumerate(listed)] == (
        [] if ends else [True] * 2
    )


def test_two_groups_in_another_order_are_told():
    crossed = [[summed(0), replace(summed(0), group="2")], [replace(summed(1), group="2"), summed(1)]]
    assert found(*crossed) == ["exchange 0 of ranks 0 and 1 is in groups 1 and 2"]
    assert faults([Notes(exchanges=own) for own in crossed], in_one_order=False) == []


def test_exchanges_on_the_cpu_need_no_order():
    assert found(*([on(send(rank), "cpu"), on(receive(rank), "cpu")] for rank in (0, 1))) == []
