"""A branch that leaves out blocks equals diffusers' own forward without them, in every exact layout."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from parallel_backend.families.shared.patchify import pad_to_patch
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_refusals import refused
from tests.support import tiny

EXACT = 1e-5
SIZES = tiny.Tiny(heads=3, layers=4)
MODEL = {"heads": 3, "layers": 4}
SKIPPED = ((), (1,), (0, 3))
"""By branch. All three have inputs of equal shapes, so only the blocks keep them from running as one batch."""
LAYOUTS = [
    (1, ""),
    (3, "ulysses=3"),
    (2, "ring=2"),
    (2, "tensor=2"),
    (2, "ulysses=2 shard_weights"),
    (4, "cfg=2 ulysses=2 shard_weights"),
    (2, "pipe=2 patches=1"),
    (3, "pipe=3 patches=1"),
    (3, "cfg=3"),
]


def stock_without(case, branch, skipped):
    """diffusers' forward of a model that lacks the blocks."""
    model = tiny.transformer(SIZES)
    model.blocks = nn.ModuleList(block for i, block in enumerate(model.blocks) if i not in skipped)
    with torch.no_grad():
        out = model(pad_to_patch(case.latent, SIZES.patch), case.timestep, case.text(branch), return_dict=False)[0]
    return out[..., : case.size[1], : case.size[2]]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.daily(3)
def test_equals_stock_without_the_blocks(pools, checkpoints, ranks, layout):
    case = Case(texts=(6, 6, 6))
    message, tensors = requests.forward(requests.spec(checkpoints(**MODEL), layout), case)
    for skipped in (SKIPPED, (), SKIPPED[::-1]):
        answers = pools(ranks).run(driver.handle, replace(message, skipped=skipped), tensors)
        assert [answer["error"] for answer in answers] == [None] * ranks
        for branch in range(3):
            wanted = stock_without(case, branch, skipped[branch] if skipped else ())
            assert requests.relative_error(answers[0]["tensors"][str(branch)], wanted) <= EXACT
    assert requests.relative_error(stock_without(case, 1, (1,)), stock_without(case, 1, ())) > 0.01


def test_branches_with_equal_blocks_run_as_one_batch(pools, checkpoints):
    message, tensors = requests.forward(requests.spec(checkpoints(**MODEL), ""), Case(texts=(6, 6, 6)))
    [answer] = pools(1).run(driver.handle, replace(message, skipped=((1, 2), (), (2, 1))), tensors)
    assert answer["steps"] == 2


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        (((0,),), "skipped names the blocks of 1 branches: it needs those of all 2"),
        (((0,), (2,)), "block 2 cannot be skipped: this model has the blocks 0 to 1"),
        (((0,), (-1,)), "block -1 cannot be skipped"),
    ],
)
def test_blocks_that_do_not_exist(pools, checkpoints, skipped, words):
    message, tensors = requests.forward(requests.spec(checkpoints(heads=2, seed=9), "ulysses=2"), Case())
    assert refused(pools, replace(message, skipped=skipped), tensors).startswith(words)
