"""Compiled blocks give what diffusers' own forward gives in every kind of layout, and are compiled once.

The code is torch's own, not inductor's, which takes a minute for a layout: what is compiled, and when, is the same.
"""

from dataclasses import replace

import pytest

from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

CLOSE = 1e-4
SIZES = tiny.Tiny(heads=3)
LAYOUTS = [
    (2, "ulysses=2"),
    (3, "ring=3"),
    (2, "cfg=2"),
    (2, "pipe=2 patches=1"),
    (2, "ulysses=2 shard_weights"),
]


@pytest.fixture(autouse=True)
def eager(pools):
    """Let the ranks compile without inductor."""
    for ranks in (2, 3):
        pools(ranks).run(driver.compile_with, "eager")
    yield
    for ranks in (2, 3):
        pools(ranks).run(driver.compile_with, "inductor")


def check(pools, path, ranks, layout, case, compiled="blocks"):
    model = replace(requests.spec(path, layout), compile=compiled)
    message, tensors = requests.forward(model, case)
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    for branch in range(len(case.texts)):
        wanted = requests.stock_forward(SIZES, case.latent, case.timestep, case.text(branch))
        assert requests.relative_error(answers[0]["tensors"][str(branch)], wanted) <= CLOSE
    return pools(ranks).run(driver.compilations)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_equals_stock_and_compiles_once(pools, checkpoints, ranks, layout):
    path = checkpoints(heads=3)
    before = pools(ranks).run(driver.compilations)
    first = check(pools, path, ranks, layout, Case())
    assert any(more > fewer for more, fewer in zip(first, before, strict=True))
    assert check(pools, path, ranks, layout, Case(seed=4)) == first
    assert check(pools, path, ranks, layout, Case(), "off") == first


def test_blocks_that_stream(pools, checkpoints, streaming):
    streaming(2)
    path = checkpoints(heads=3, layers=7)
    model = replace(requests.spec(path, "ulysses=2"), compile="blocks")
    message, tensors = requests.forward(model, Case())
    answers = pools(2).run(driver.handle, replace(message, adapt=True), tensors)
    plain = pools(2).run(driver.handle, replace(message, adapt=True, model=replace(model, compile="off")), tensors)
    assert [answer["error"] for answer in answers + plain] == [None] * 4
    assert requests.relative_error(answers[0]["tensors"]["0"], plain[0]["tensors"]["0"]) <= CLOSE


def test_tensor_is_refused_before_anything_is_loaded(pools, checkpoints):
    model = replace(requests.spec(checkpoints(heads=3, seed=9), "tensor=2"), compile="blocks")
    message, tensors = requests.forward(model, Case())
    for answer in pools(2).run(driver.handle, message, tensors):
        assert "compile=blocks does not work with tensor=2" in answer["error"]
        assert not [each for each in answer["models"] if each.path == model.path]
