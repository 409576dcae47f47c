"""Blocks stream from the machine's memory where the devices have no room for them, and the results stay the same."""

import pytest

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.engine.working_memory import forward_bytes
from parallel_backend.protocol.tensors import describe
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

LARGE = {"heads": 3, "layers": 40, "seed": 11}
SIZES = tiny.Tiny(heads=3, layers=40, seed=11)
TOLERANCE = 1e-5


@pytest.fixture
def limit(pools):
    """``limit(ranks, bytes)`` limits the memory of each rank of a pool."""
    limited = []

    def set_limit(ranks, nbytes):
        limited.append(ranks)
        pools(ranks).run(driver.limit_memory, nbytes)

    yield set_limit
    for ranks in limited:
        pools(ranks).run(driver.limit_memory, None)


def weights_of(sizes):
    """Bytes of a tiny transformer."""
    return sum(parameter.nbytes for parameter in tiny.transformer(sizes).parameters())


def work_of(path, layout, ranks, case):
    """The bytes that a rank's tensors take, by the estimate."""
    message, tensors = requests.sample(requests.spec(path, layout, ranks=ranks), case)
    plan = check_sample(message, describe(tensors), open_checkpoint(path), ranks)
    return max(forward_bytes("WanTransformer3DModel", plan, rank, 4) for rank in range(plan.layout.ranks))


def note_of(answer, path):
    """What a rank says about a model."""
    return next(model.note for model in answer["models"] if model.path == str(path))


def matches(answers, wanted):
    """Whether every rank succeeded and the latent is the wanted one."""
    errors = [answer["error"] for answer in answers]
    assert errors == [None] * len(answers), errors
    return requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= TOLERANCE


SHARED = [
    (2, "ulysses=2"),
    (2, "cfg=2"),
    (2, "tensor=2"),
    (2, "pipe=2 patches=1"),
    (2, "ulysses=2 shard_weights"),
    (3, "ring=3"),
    (3, "data=3"),
]


@pytest.mark.parametrize(("ranks", "layout"), SHARED)
def test_a_model_of_more_than_all_limits_together_samples_the_same(pools, checkpoints, limit, ranks, layout):
    path, case = checkpoints(**LARGE), Case()
    limit(ranks, int(weights_of(SIZES) / ranks / 2.5) + work_of(path, layout, ranks, case) * 5 // 4)
    message, tensors = requests.sample(requests.spec(path, layout, ranks=ranks), case)
    wanted = requests.stock_sample(SIZES, case)
    for _ in range(2):
        answers = pools(ranks).run(driver.handle, message, tensors)
        assert matches(answers, wanted)
    assert "stream from the machine's memory" in note_of(answers[0], path)
    assert any("stream from" in progress.note for progress, _ in answers[0]["reports"])
