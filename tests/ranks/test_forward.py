"""Any layout gives what diffusers' own forward gives on one process."""

import pytest

from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

EXACT = 1e-5

LAYOUTS = [
    (1, ""),
    (2, "ulysses=2"),
    (3, "ulysses=3"),
    (4, "ulysses=4"),
    (2, "cfg=2"),
    (2, "data=2"),
    (3, "data=3"),
    (4, "cfg=2 ulysses=2"),
    (4, "data=2 cfg=2"),
    (4, "data=2 ulysses=2"),
    (4, "ulysses=2"),
    (3, "cfg=2"),
]


def check(pools, path, sizes, ranks, layout, case, *, limit=EXACT):
    message, tensors = requests.forward(requests.spec(path, layout, ranks=max(4, ranks)), case)
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    assert all(not answer["tensors"] for answer in answers[1:])
    for branch in range(len(case.texts)):
        wanted = requests.stock_forward(sizes, case.latent, case.timestep, case.text(branch))
        assert requests.relative_error(answers[0]["tensors"][str(branch)], wanted) <= limit
    return answers


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.daily(9)
def test_layout_equals_stock(pools, checkpoints, ranks, layout, batch):
    check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), ranks, layout, Case(batch=batch))


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.daily(5)
def test_heads_need_not_be_divisible(pools, checkpoints, heads, ranks):
    check(pools, checkpoints(heads=heads), tiny.Tiny(heads=heads), ranks, f"ulysses={ranks}", Case(batch=1))


@pytest.mark.parametrize("size", [(1, 2, 2), (1, 2, 5), (1, 5, 3), (5, 3, 3)])
@pytest.mark.parametrize("layout", ["ulysses=4", "cfg=2 ulysses=2"])
def test_tokens_need_not_be_divisible_and_may_be_fewer_than_ranks(pools, checkpoints, size, layout):
    check(pools, checkpoints(heads=3), tiny.Tiny(heads=3), 4, layout, Case(batch=1, size=size))


def test_fewer_samples_than_data_ranks_leaves_some_idle(pools, checkpoints):
    answers = check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), 3, "data=3", Case(batch=2, texts=(4,)))
    assert [answer["steps"] for answer in answers] == [1, 1, 0]


def test_both_cfg_groups_compute(pools, checkpoints):
    answers = check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), 4, "cfg=2 ulysses=2", Case())
    assert [answer["steps"] for answer in answers] == [1, 1, 1, 1]


def test_equal_branches_on_one_rank_run_as_one_batch(pools, checkpoints):
    alike = check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), 2, "ulysses=2", Case(texts=(6, 6)))
    other = check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), 2, "ulysses=2", Case(texts=(6, 5)))
    assert [answer["steps"] for answer in alike] == [1, 1]
    assert [answer["steps"] for answer in other] == [2, 2]


def test_odd_branch_counts_over_cfg(pools, checkpoints):
    answers = check(pools, checkpoints(heads=4), tiny.Tiny(heads=4), 2, "cfg=2", Case(texts=(6, 5, 6)))
    assert [answer["steps"] for answer in answers] == [2, 1]


def test_larger_patch(pools, checkpoints):
    sizes = tiny.Tiny(heads=3, patch=(2, 2, 2))
    check(pools, checkpoints(heads=3, patch=(2, 2, 2)), sizes, 3, "ulysses=3", Case(batch=1, size=(3, 5, 4)))
