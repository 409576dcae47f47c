"""Two gloo ranks of a backend that share one GPU compute the same as one rank on it."""

from pathlib import Path

import pytest
import torch

from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from tests.ranks import requests
from tests.ranks.requests import Case, relative_error
from tests.support import gpus, tiny

CARD = Devices(kind="cuda", indices=(0, 0), visible=gpus.VISIBLE, collectives="gloo")
LAYOUTS = ["ulysses=2", "ring=2", "cfg=2", "data=2", "tensor=2", "ulysses=2 shard_weights", "pipe=2"]
LOOPS = ["pipe=2 patches=3", "ring=2 stale=previous"]
EXACT = {"float32": 1e-4, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with temporary_backend(tmp_path_factory.mktemp("backend")) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model", tiny.Tiny(heads=3, vae=False))


def predict(client, model, layout, dtype, devices=CARD):
    case = Case()
    spec = ModelSpec(path=str(model), devices=devices, dtype=dtype, layout=ParallelLayout.parse(layout))
    return client.call(Forward(model=spec, branches=len(case.texts)), case.forward_inputs())


def check(client, model, layout, dtype, devices=CARD):
    one, two = (predict(client, model, text, dtype, devices) for text in ("one rank", layout))
    assert len(client.status().ranks) == 2
    for branch, expected in one.items():
        assert torch.isfinite(expected).all()
        assert relative_error(two[branch].float(), expected.float()) <= EXACT[dtype]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_on_one_card_equal_one(on_card, client, model, layout, dtype):
    predict(client, model, layout, dtype)  # starts both ranks; "one rank" then uses one of them
    check(client, model, layout, dtype)
    assert {rank.device for rank in client.status().ranks} == {"cuda:0"}


@pytest.mark.parametrize("layout", LOOPS)
def test_step_loops_on_one_card_are_those_of_cpu_ranks(on_card, client, model, layout):
    layout = ParallelLayout.parse(f"{layout} balance=1:1")
    cpu = Devices(kind="cpu", indices=(0, 1))
    specs = [ModelSpec(path=str(model), devices=devices, dtype="float32", layout=layout) for devices in (CARD, cpu)]
    on_gpu, on_cpu = (client.call(*requests.sample(spec, Case()))["samples"] for spec in specs)
    assert relative_error(on_gpu, on_cpu) <= EXACT["float32"]
