"""Messages of GPUs start as one operation, in the order in which torch starts them."""

from unittest import mock

import torch

from parallel_backend.distributed import collectives
from parallel_backend.distributed.mesh import Axis


def test_messages_of_gpus_start_as_one_operation():
    group = mock.Mock()
    axis = Axis(name="ring", ranks=(4, 5, 6), index=1, group=group, gloo=False, tag=7)
    first, second, arriving, empty = torch.ones(2), torch.ones(3), torch.ones(4), torch.ones(0)
    with mock.patch.object(collectives, "coalesces", return_value=True):
        works = collectives.start_messages([(2, first), (2, second), (0, empty)], [(0, arriving)], axis)
    start, *messages, end = group.mock_calls
    assert (start, end) == (mock.call._start_coalescing(first.device), mock.call._end_coalescing(first.device))
    sent = [(name, [id(each) for each in tensors], *rest) for name, (tensors, *rest), _ in messages]
    assert sent == [("send", [id(first)], 2, 7), ("send", [id(second)], 2, 7), ("recv", [id(arriving)], 0, 7)]
    assert works == [group._end_coalescing.return_value]


def test_nothing_starts_without_messages():
    axis = Axis(name="ring", ranks=(0, 1), index=0, group=None, gloo=False)
    assert collectives.start_messages([(1, torch.ones(0))], [], axis) == []


def test_only_messages_of_gpus_without_gloo_coalesce():
    gloo, nccl = (Axis(name="ring", ranks=(0, 1), index=0, group=None, gloo=gloo) for gloo in (True, False))
    on_gpu = mock.Mock(is_cuda=True)
    assert collectives.coalesces(nccl, on_gpu)
    assert not collectives.coalesces(gloo, on_gpu)
    assert not collectives.coalesces(nccl, torch.ones(1))
