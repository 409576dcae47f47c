"""A request's plan, as every rank makes it from the header."""

import pytest

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_forward
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify import examples


@pytest.mark.parametrize("name", ["MochiTransformer3DModel", "WanTransformer3DModel"])
def test_the_plan_has_the_polynomial_of_its_family(name, tmp_path):
    kind = next(kind for each, kind in examples.variants() if each == name)
    path = examples.write_checkpoint(tmp_path / "model", examples.module(name, kind))
    metas = describe(examples.branches([examples.inputs(name, kind, batch=1)]))
    spec = ModelSpec(path=str(path), devices=Devices(kind="cpu", indices=(0,)), layout=ParallelLayout())
    plan = check_forward(Forward(model=spec, branches=1), metas, open_checkpoint(path), 1)
    assert plan.teacache == family_of(name).teacache
    assert bool(plan.teacache) == name.startswith("Mochi")
