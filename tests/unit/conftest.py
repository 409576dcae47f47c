"""A tiny checkpoint, made once per session, and an engine of one rank."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.engine.engine import Engine
from parallel_backend.protocol.messages import RankRequest
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from tests.support import tiny

Ask = Callable[..., dict[str, Tensor]]


def pytest_collection_finish() -> None:
    """Keep the garbage collector, which tests call often, from looking at what is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline with all components. Tests must not change it."""
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def engine() -> Engine:
    """One CPU rank with nothing loaded."""
    return Engine(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def ask(engine: Engine) -> Ask:
    """``ask(message, tensors)`` has ``engine`` handle a request."""

    def handle(message: RankRequest, tensors: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        options = {"report": lambda *_: None, "cancelled": lambda: False} | options
        return engine.handle(message, describe(tensors), tensors, **options)

    return handle


def one_rank(path: Path, **options: Any) -> ModelSpec:
    """The spec of a model on one CPU rank."""
    return ModelSpec(path=str(path), devices=Devices(kind="cpu", indices=(0,)), **options)
