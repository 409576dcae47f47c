"""What ``verify --memory`` and ``bench memory`` measure on GPUs. There is no GPU here: their memory is faked."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.bench import memory as bench_memory
from lab.bench.memory import FileMemory
from lab.verify.forward import memory
from lab.verify.forward.memory import Growth
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples

TWO = Devices(kind="cuda", indices=(0, 1))
PHASE = 0.5
"""Seconds that a fake rank loads and computes."""


class Cards:
    """Two GPUs, and a client of a backend whose ranks use their memory."""

    def __init__(self) -> None:
        self.used = 100

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1000 - self.used, 1000

    def call(self, message: Any, tensors: Any) -> dict[str, Any]:
        for self.used in (500, 300):
            time.sleep(PHASE)
        self.used = 200
        return {"0": torch.ones(3), "seconds": torch.tensor([PHASE])}

    def status(self) -> Any:
        raise AssertionError("the memory of processes does not matter")


@pytest.fixture
def cards(monkeypatch):
    made = Cards()
    monkeypatch.setattr(torch.cuda, "mem_get_info", made.mem_get_info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return made


def test_the_growth_of_the_gpus_memory_is_that_of_both(cards, monkeypatch):
    saved: Any = SimpleNamespace(name="wan", path=Path("model"), inputs={}, expected=torch.ones(3), bytes=1000)
    monkeypatch.setattr(examples, "branches", lambda inputs: {})
    ranks = memory._Ranks(cards, ParallelLayout.parse("ulysses=2 shard_weights"), TWO)
    growth = ranks.measure_growth(saved)
    assert growth == Growth(
        on_gpus=True, model="wan", layout="ulysses=2 shard_weights", checkpoint=1000, loading=800, computing=400,
        after=200, max_rel_error=0.0,
    )  # fmt: skip
    assert not growth.failed
    assert "the memory of the GPUs grew by 0.80 of that while loading, 0.40 while computing, 0.20" in growth.describe()


@pytest.mark.parametrize(("change", "failed"), [({"loading": 1301}, True), ({"after": 1900}, False)])
def test_what_torch_keeps_on_a_gpu_afterwards_is_no_failure(change, failed):
    growth = Growth(
        on_gpus=True, model="wan", layout="", checkpoint=1000, loading=0, computing=0, after=0, max_rel_error=0.0
    )
    assert replace(growth, **change).failed == failed
    assert replace(growth, on_gpus=False, **change).failed


@pytest.mark.parametrize(("count", "layouts"), [(2, ["ulysses=2 shard_weights"]), (4, list(memory.LAYOUTS))])
def test_layouts_are_measured_that_the_gpus_suffice_for(cards, monkeypatch, count, layouts):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(memory, "MODELS", memory.MODELS[:1])
    monkeypatch.setattr(memory, "temporary_backend", lambda folder: contextlib.nullcontext(cards))
    monkeypatch.setattr(memory, "_write", lambda *_: None)
    monkeypatch.setattr(memory._Ranks, "call", lambda *_: None)
    monkeypatch.setattr(memory._Ranks, "measure_growth", lambda ranks, _: (str(ranks.layout), ranks.devices.kind))
    found: list[Any] = list(memory.measure())
    assert found == [(layout, "cuda") for layout in layouts]


def test_a_model_file_is_measured_on_gpus(cards, monkeypatch):
    monkeypatch.setattr(bench_memory, "temporary_backend", lambda folder: contextlib.nullcontext(cards))
    spec = ModelSpec(path="/", devices=TWO)
    assert bench_memory._memory(Path(), spec) == (1000, 400)


@pytest.mark.parametrize(("kind", "failed"), [("cpu", True), ("cuda", False)])
def test_a_gpu_may_keep_what_gathered_blocks_took(kind, failed):
    assert FileMemory(kind=kind, layout="", file=1000, peak=1400, after=0).failed == failed
    assert FileMemory(kind=kind, layout="", file=1000, peak=1600, after=0).failed
