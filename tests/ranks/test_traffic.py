"""The bytes that ranks send, counted at the dispatcher, equal the strategies' formulas."""

import pytest

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_forward
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.tensors import describe
from parallel_backend.strategies import STRATEGIES
from tests.ranks import driver, requests
from tests.support import families

LAYOUTS = [
    "ulysses=2", "ulysses=3", "ring=3", "ring=4", "ring=2 ulysses=2", "tensor=2", "tensor=3", "tensor=2 ulysses=2",
    "tensor=2 ring=2", "cfg=2", "cfg=2 ulysses=2", "data=2 ulysses=2", "data=2 tensor=2", "ulysses=3 shard_weights",
    "cfg=2 ring=2 shard_weights",
]  # fmt: skip
KINDS = [("FluxTransformer2DModel", "dev"), ("WanTransformer3DModel", "i2v 2.1")]


def parameters(name, kind):
    blocks = families.family(name, kind).blocks
    return tuple(
        (tuple(parameter.shape), parameter.itemsize)
        for block in blocks
        for module in block.modules
        for parameter in module.parameters()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.daily(15)
def test_bytes_follow_the_formulas(pools, folders, name, kind, layout):
    branches = [families.inputs(name, kind, batch=3), families.inputs(name, kind, batch=1)]
    tensors = {f"{i}.{key}": value for i, inputs in enumerate(branches) for key, value in inputs.items()}
    path, degrees = folders(name, kind), ParallelLayout.parse(layout)
    message = Forward(model=requests.spec(path, layout), branches=2, measure="bytes")
    answers = pools(degrees.ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * degrees.ranks
    plan = check_forward(message, describe(tensors), open_checkpoint(path), 4)
    workload = plan.workload(parameters=parameters(name, kind))
    wanted = [sum(s.bytes_sent(degrees, workload, rank) for s in STRATEGIES) for rank in range(degrees.ranks)]
    assert answers[0]["tensors"]["sent_bytes"].tolist() == wanted
