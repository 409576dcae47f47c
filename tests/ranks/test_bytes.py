"""What ranks really send is what the strategies say they send."""

from contextlib import contextmanager

import pytest
import torch.distributed as dist

from parallel_backend.checkpoint import Checkpoint
from parallel_backend.layout import ParallelLayout
from parallel_backend.payload import describe
from parallel_backend.strategies import STRATEGIES
from parallel_backend.validation import check_sample
from tests.ranks import driver, requests
from tests.ranks.requests import Case

STEPS = 3


@contextmanager
def counted():
    """Counts the bytes that this rank sends to others through ``all_to_all_single``."""
    real, sent = dist.all_to_all_single, []

    def count(received, buffer, receive_sizes, send_sizes, group):
        own = dist.get_rank(group)
        sent.append(sum(size for i, size in enumerate(send_sizes) if i != own) * buffer.itemsize)
        return real(received, buffer, receive_sizes, send_sizes, group=group)

    dist.all_to_all_single = count
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
    measured = pools(4).run(handle_and_count, message, tensors) if degrees.ranks == 4 else None
    measured = measured or pools(degrees.ranks).run(handle_and_count, message, tensors)
    for rank, (total, gathered) in enumerate(measured):
        a_step = sum(strategy.bytes_sent(degrees, job, rank) for strategy in STRATEGIES)
        assert total - gathered == STEPS * a_step, f"rank {rank}"
        samples_elsewhere = rank > 0 and rank % (degrees.cfg * degrees.ulysses) == 0
        assert bool(gathered) == (samples_elsewhere and case.batch > 1)


def test_ulysses_sends_less_than_gathering_tokens(pools, checkpoints):
    """The point of Ulysses: per rank about 4 S D / u, where all-gathering k and v alone takes 2 S D (u - 1) / u."""
    job = check_sample(
        *_sample(checkpoints(heads=3, layers=1), "ulysses=4"), Checkpoint.open(checkpoints(heads=3, layers=1)), 4
    ).job()
    ulysses = STRATEGIES[1].bytes_sent(ParallelLayout(ulysses=4), job, 0)
    own_tokens = job.tokens // 4
    gathered = 3 * 2 * own_tokens * job.heads * job.head_dim * job.branches * job.samples * job.layers * job.itemsize
    assert ulysses < gathered


def _sample(path, layout):
    message, tensors = requests.sample(requests.spec(path, layout), Case())
    return message, describe(tensors)
