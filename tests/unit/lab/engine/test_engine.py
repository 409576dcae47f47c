"""What the lab's ranks do besides what every rank does."""

import os
import sys
from typing import Any

import pytest
import torch

from lab.engine import MODULE, lab_ranks
from lab.engine.engine import LabEngine
from lab.engine.handicap import Slowed
from parallel_backend import env
from parallel_backend.engine.engine import Engine
from parallel_backend.protocol.messages import Decode, Forward, Trial
from parallel_backend.protocol.tensors import describe
from parallel_backend.rank.__main__ import _engine_class
from tests.ranks.requests import Case
from tests.unit.conftest import one_rank

CPU = torch.device("cpu")


def ask(engine: Engine, message: Any, tensors: Any) -> Any:
    return engine.handle(message, describe(tensors), tensors, report=lambda *_: None, cancelled=lambda: False)


def loaded(engine: Engine, name: str) -> Any:
    (components,) = engine._models.values()
    return components.parts.get(name, lambda: sys.exit("it is loaded"))


@pytest.fixture
def lab() -> LabEngine:
    return LabEngine(rank=0, world_size=1, device=CPU)


def test_ranks_use_the_engine_that_a_variable_names(monkeypatch):
    monkeypatch.delenv(env.LAB.name, raising=False)
    assert _engine_class() is Engine
    with lab_ranks():
        assert (os.environ[env.LAB.name], _engine_class()) == (MODULE, LabEngine)
    assert env.LAB.name not in os.environ
    monkeypatch.setenv(env.LAB.name, "no.such.module")
    with pytest.raises(ModuleNotFoundError, match="no"):
        _engine_class()


def test_tensors_come_back(lab, tmp_path):
    sent = {"x": torch.arange(3.0)}
    back = ask(lab, Trial(model=one_rank(tmp_path), name="echo", amount=2), sent)
    assert torch.equal(back["x"], sent["x"])
    assert back["made"].tolist() == [0.5, 0.5]


def test_pixels_of_a_counted_decode_are_not_clamped(lab, engine, checkpoint):
    latent = {"latent": torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))}
    asked = Decode(model=one_rank(checkpoint), measure="bytes")
    for each in (lab, engine):
        ask(each, asked, latent)
        with torch.inference_mode():
            loaded(each, "vae").decoder.conv_out.weight.mul_(100.0)
    got, ordinary = ask(lab, asked, latent), ask(engine, asked, latent)
    assert got.keys() - ordinary.keys() == {"grown_bytes"}
    assert got["grown_bytes"].shape == (1,)
    assert torch.equal(got["pixels"].clamp(0, 1), ordinary["pixels"])
    assert not torch.equal(got["pixels"], ordinary["pixels"])


def test_a_request_without_a_measurement_is_the_products(lab, engine, checkpoint):
    latent = {"latent": torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))}
    got, ordinary = (ask(each, Decode(model=one_rank(checkpoint)), latent) for each in (lab, engine))
    assert got.keys() == ordinary.keys() == {"pixels"}
    assert torch.equal(got["pixels"], ordinary["pixels"])


@pytest.mark.parametrize("factor", ["", "0=2"])
def test_a_rank_with_a_handicap_computes_the_same(monkeypatch, checkpoint, engine, factor):
    monkeypatch.setenv(env.HANDICAP.name, factor)
    slow = LabEngine(rank=0, world_size=1, device=CPU)
    inputs = Case(texts=(9,)).forward_inputs()
    message = Forward(model=one_rank(checkpoint), branches=1)
    for _ in range(2):
        assert torch.equal(ask(slow, message, inputs)["0"], ask(engine, message, inputs)["0"])
    assert isinstance(loaded(slow, "transformer").run, Slowed) == bool(factor)
    assert slow._meshes.speeds() == (1.0,)
