"""Ranks of unequal speed get unequal shares; the result equals one process's, and the bytes those of the formulas."""

import pytest

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_forward, check_sample
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.split import Split
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.tensors import describe
from parallel_backend.strategies import STRATEGIES
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_forward import EXACT, check
from tests.ranks.test_sample import CLOSE
from tests.ranks.test_traffic import parameters
from tests.support import families, tiny

LAYOUTS = [
    "ulysses=2 balance=2:1", "ulysses=3 balance=1:1:0.5", "ring=2 balance=2:1", "ring=3 balance=1:1:0.5",
    "tensor=2 balance=2:1", "tensor=3 balance=1:1:0.5", "ulysses=2 balance=2:1/1:3", "tensor=2 balance=1:2/3:1",
    "ulysses=3 balance=1:1000:1", "ring=2 ulysses=2 balance=4:2:2:1", "cfg=2 ulysses=2 balance=2:1",
    "data=2 ring=2 balance=1:3", "tensor=2 ulysses=2 balance=3:2:2:1", "tensor=2 ring=2 balance=1:1:1:0.5",
    "ring=3 shard_weights balance=1:1:0.5", "tensor=2 ulysses=2 shard_weights balance=3:2:2:1", "data=2 balance=3:1",
    "cfg=2 data=2 balance=1:5",
]  # fmt: skip
FAMILIES = [
    ("FluxTransformer2DModel", "dev", "ulysses=3 balance=1:1:0.5"),
    ("FluxTransformer2DModel", "dev", "ring=2 balance=2:1"),
    ("FluxTransformer2DModel", "dev", "tensor=3 balance=1:1:0.5"),
    ("FluxTransformer2DModel", "dev", "tensor=2 balance=2:1/3:1"),
    ("Flux2Transformer2DModel", "dev", "tensor=2 balance=2:1/3:1"),
    ("WanTransformer3DModel", "i2v 2.1", "ulysses=2 balance=2:1"),
    ("WanTransformer3DModel", "i2v 2.1", "tensor=3 balance=1:1:0.5"),
    ("WanTransformer3DModel", "i2v 2.1", "data=2 balance=1:3"),
    ("LTX2VideoTransformer3DModel", "2", "ulysses=3 balance=1:1:0.5"),
    ("LTX2VideoTransformer3DModel", "2", "ring=2 ulysses=2 balance=4:2:2:1"),
    ("LTX2VideoTransformer3DModel", "2", "tensor=2 balance=2:1/3:1"),
    ("Krea2Transformer2DModel", "masked", "ulysses=3 balance=1:1:0.5"),
    ("Krea2Transformer2DModel", "masked", "tensor=2 ulysses=2 balance=3:2:2:1"),
    ("LatteTransformer3DModel", "video", "dsp=2 balance=2:1"),
    ("LatteTransformer3DModel", "video", "dsp=3 balance=1:1:0.5/1:2:0.5"),
    ("LatteTransformer3DModel", "video", "dsp=3 shard_weights balance=1:1:0.5"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [5, 4])
@pytest.mark.daily(11)
def test_equals_stock(pools, checkpoints, layout, heads):
    """36 tokens of the picture and 9 and 4 of the texts, of two samples."""
    ranks = ParallelLayout.parse(layout).ranks
    check(pools, checkpoints(heads=heads), tiny.Tiny(heads=heads), ranks, layout, Case())


@pytest.mark.parametrize("layout", ["data=2 balance=2:1", "data=3 balance=1:1:0.5", "cfg=2 data=2 balance=1:4"])
def test_five_samples_are_shared_by_speed(pools, checkpoints, layout):
    ranks = ParallelLayout.parse(layout).ranks
    check(pools, checkpoints(heads=3), tiny.Tiny(heads=3), ranks, layout, Case(batch=5))


@pytest.mark.parametrize(("name", "kind", "layout"), FAMILIES)
@pytest.mark.daily(5)
def test_families_equal_stock_and_bytes_the_formulas(pools, folders, name, kind, layout):
    parsed, path = ParallelLayout.parse(layout), folders(name, kind)
    branches = [families.inputs(name, kind, batch=2, seed=seed) for seed in range(2)]
    tensors = {f"{i}.{key}": value for i, inputs in enumerate(branches) for key, value in inputs.items()}
    message = Forward(model=requests.spec(path, layout), branches=2, measure="bytes")
    answers = pools(parsed.ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * parsed.ranks
    for i, inputs in enumerate(branches):
        wanted = families.family(name, kind).stock(inputs)
        assert requests.relative_error(answers[0]["tensors"][str(i)], wanted) <= EXACT
    workload = check_forward(message, describe(tensors), open_checkpoint(path), 4).workload(
        parameters=parameters(name, kind)
    )
    sent = [sum(each.bytes_sent(parsed, workload, rank) for each in STRATEGIES) for rank in range(parsed.ranks)]
    assert answers[0]["tensors"]["sent_bytes"].tolist() == sent


@pytest.mark.parametrize("layout", ["ring=3 balance=1:1:0.5", "cfg=2 ulysses=2 balance=2:1", "tensor=2 balance=2:1"])
def test_a_step_loop_equals_the_plain_one(pools, checkpoints, layout):
    case, parsed, path = Case(), ParallelLayout.parse(layout), checkpoints(heads=3)
    message, tensors = requests.sample(requests.spec(path, layout), case, measure="bytes")
    answers = pools(parsed.ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * parsed.ranks
    wanted = requests.stock_sample(tiny.Tiny(heads=3), case)
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= CLOSE
    workload = check_sample(message, describe(tensors), open_checkpoint(path), 4).workload()
    by_rank = [sum(each.bytes_sent(parsed, workload, rank) for each in STRATEGIES) for rank in range(parsed.ranks)]
    calls, flag = len(tensors["sigmas"]) - 1, 8
    by_rank = [calls * (sent + (flag * (parsed.ranks - 1) if rank == 0 else 0)) for rank, sent in enumerate(by_rank)]
    assert answers[0]["tensors"]["sent_bytes"].tolist() == by_rank


def held(pools, path, layout):
    """The bytes of the blocks' weights that each rank holds."""
    parsed = ParallelLayout.parse(layout)
    message, tensors = requests.forward(requests.spec(path, layout), Case(texts=(9,)))
    answers = pools(parsed.ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * parsed.ranks
    return pools(parsed.ranks).run(driver.held_bytes, "blocks.")


def test_a_rank_of_tensor_with_a_smaller_share_holds_less_of_the_weights(pools, checkpoints):
    path = checkpoints(heads=4, seed=9)
    even, unequal = held(pools, path, "tensor=2"), held(pools, path, "tensor=2 balance=3:1")
    assert even[0] == pytest.approx(even[1], rel=0.01)
    assert unequal[1] / sum(unequal) == pytest.approx(0.25, abs=0.04)
    assert Split.of(ParallelLayout.parse("tensor=2 balance=3:1")).cut_share(1) == 0.25


def test_layouts_with_other_shares_of_the_same_model_take_turns(pools, checkpoints):
    """Weights that are cut otherwise are loaded anew, and those that are whole stay."""
    path, sizes = checkpoints(heads=4, seed=11), tiny.Tiny(heads=4, seed=11)
    loads = []
    for layout in ("tensor=2", "tensor=2 balance=2:1", "ulysses=2", "ulysses=2 balance=2:1", "ring=2 balance=1:2"):
        answers = check(pools, path, sizes, 2, layout, Case())
        loads.append(next(model.loads for model in answers[0]["models"] if model.path == str(path)))
    assert loads == [1, 2, 3, 3, 3]
