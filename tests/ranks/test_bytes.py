"""What ranks really send is what the strategies say they send."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from parallel_backend.checkpoint import Checkpoint
from parallel_backend.layout import ParallelLayout
from parallel_backend.payload import describe
from parallel_backend.strategies import STRATEGIES, Job, Ulysses
from parallel_backend.validation import check_sample
from tests.ranks import driver, requests
from tests.ranks.requests import Case

STEPS = 3


@contextmanager
def counted():
    """Counts the bytes that this rank sends to others through ``all_to_all_single``."""
    real, sent = dist.all_to_all_single, []

    def count(received: Any, buffer: Any, receive_sizes: Any, send_sizes: Any, group: Any) -> Any:
        own = dist.get_rank(group)
        sent.append(sum(size for i, size in enumerate(send_sizes) if i != own) * buffer.itemsize)
        return real(received, buffer, receive_sizes, send_sizes, group=group)

    dist.all_to_all_single = count  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_to_all_single = real


def handle_and_count(rank, message, tensors):
    """Bytes that the rank sends in a ``Sample``, all exchanges together and the last one alone."""
    with counted() as sent:
        assert driver.handle(rank, message, tensors)["error"] is None
    return sum(sent), sent[-1]


@pytest.mark.parametrize(
    "layout", ["ulysses=4", "ulysses=3", "cfg=2", "cfg=2 ulysses=2", "data=2 cfg=2", "data=2 ulysses=2"]
)
@pytest.mark.parametrize("case", [Case(batch=3), Case(batch=1, size=(1, 3, 3))], ids=["odd", "few tokens"])
def test_bytes_follow_the_formula(pools, checkpoints, layout, case):
    path, degrees = checkpoints(heads=3), ParallelLayout.parse(layout)
    message, tensors = requests.sample(requests.spec(path, layout), case)
    job = check_sample(message, describe(tensors), Checkpoint.open(path), 4).job()
    measured = pools(degrees.ranks).run(handle_and_count, message, tensors)
    for rank, (total, gathered) in enumerate(measured):
        a_step = sum(strategy.bytes_sent(degrees, job, rank) for strategy in STRATEGIES)
        assert total - gathered == STEPS * a_step, f"rank {rank}"
        samples_elsewhere = rank > 0 and rank % (degrees.cfg * degrees.ulysses) == 0
        assert bool(gathered) == (samples_elsewhere and case.batch > 1)


def test_ulysses_sends_less_than_gathering_keys_and_values():
    """Per rank about ``4 S D / u``, where an all-gather of k and v takes ``2 S D (u - 1) / u``."""
    job = Job(branches=1, samples=1, tokens=4096, heads=16, head_dim=64, layers=1, values=64, itemsize=4)
    gathering = 2 * 4096 // 8 * 16 * 64 * 7 * 4
    assert Ulysses().bytes_sent(ParallelLayout(ulysses=8), job, 0) < gathering
