"""Blocks that stream to a GPU compute with their own weights, and a small card gives the same result."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parallel_backend import env
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.interfaces.family import Block
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading.cpu_store import share
from parallel_backend.loading.partial import allocate
from parallel_backend.loading.streamed_blocks import StreamedBlocks
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from tests.ranks import requests
from tests.ranks.requests import Case, relative_error
from tests.support import gpus, tiny
from tests.unit.loading.test_loading import ALONE

SIZES = tiny.Tiny(heads=3, layers=40, seed=11, vae=False)
CARD = Devices(kind="cuda", indices=(0, 0), visible=gpus.VISIBLE, collectives="gloo")
WIDTH, BLOCKS, RUNS = 3000, 7, 5


def streamed_runs() -> tuple[bool, list[float]]:
    """Return whether the memory is registered with CUDA, and how far each run is from resident weights."""
    device, module = torch.device("cuda", 0), nn.Module()
    module.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(BLOCKS))
    blocks = [Block(run=partial(_compute, layer), modules=(layer,)) for layer in module.layers]
    family: Any = SimpleNamespace(module=module, blocks=blocks, shared=[])
    streamed = StreamedBlocks(family, (0, 1, 2, 4, 5))
    store = share(streamed.nbytes, 0, device, ALONE.all_ranks)
    assert store is not None
    streamed.place(store, device)
    allocate(module, device)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(BLOCKS)]
    for (name, parameter), weight in zip(module.named_parameters(), weights, strict=True):
        streamed.homes.get(name, parameter).data.copy_(weight)
    resident = [weight.to(device) for weight in weights]
    errors = []
    with torch.inference_mode():
        for _ in range(RUNS):
            got = expected = torch.randn(WIDTH, WIDTH, device=device)
            for block in family.blocks:
                got = block.run(got)
            for weight in resident:
                expected = _multiply(expected, weight)
            errors.append(float((got - expected).abs().max() / expected.abs().max()))
    return store.data.is_pinned(), errors


def _compute(layer: nn.Module, state: Any) -> Any:
    assert isinstance(layer, nn.Linear)
    return _multiply(state, layer.weight)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(4):  # long enough for a copy that comes too early to do harm
        x = torch.tanh(x @ weight)
    return x


def test_blocks_compute_with_their_own_weights(on_card):
    pinned, errors = on_card(streamed_runs)
    assert pinned
    assert errors == [0.0] * RUNS


def test_two_ranks_of_a_small_card_sample_the_same(on_card, tmp_path, monkeypatch):
    model = tiny.write(tmp_path / "tiny" / "model", SIZES)
    whole = sum(parameter.nbytes for parameter in tiny.transformer(SIZES).parameters())
    monkeypatch.setenv(env.MEMORY_LIMIT.name, str(3 * whole // 4))
    spec = ModelSpec(path=str(model), devices=CARD, dtype="float32", layout=ParallelLayout(ulysses=2))
    with temporary_backend(tmp_path) as client:
        for _ in range(2):
            got = client.call(*requests.sample(spec, Case()))["samples"]
            assert relative_error(got, requests.stock_sample(SIZES, Case())) <= 1e-4
        assert {"stream from" in model.note for rank in client.status().ranks for model in rank.models} == {True}
