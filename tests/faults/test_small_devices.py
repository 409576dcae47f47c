"""Devices with too little memory, through the real backend: a picture, or one sentence with the numbers."""

from pathlib import Path

import pytest
import torch

from parallel_backend import env
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.engine.validation import check_sample
from parallel_backend.engine.working_memory import forward_bytes
from parallel_backend.errors import NoRoom
from parallel_backend.loading.load import transformer_bytes
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Decode, EncodeText
from parallel_backend.protocol.model_spec import ModelSpec
from parallel_backend.protocol.status import LoadedModel, RankStatus, Status
from parallel_backend.protocol.tensors import describe
from scripts.processes import wait_until
from tests.ranks import requests
from tests.ranks.requests import Case
from tests.support import tiny

SIZES = tiny.Tiny(heads=3, layers=30, seed=21)
TEXT = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("small") / "model", SIZES)


def backend(runtime: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> Client:
    """Start a backend whose ranks have this much memory each."""
    monkeypatch.setenv(env.MEMORY_LIMIT.name, str(limit))
    client = Client(endpoint=Endpoint(folder=runtime))
    client.start()
    return client


def loaded(client: Client) -> list[LoadedModel]:
    """What each rank holds, once all of them have said that they have nothing to do."""
    ranks = wait_until(lambda: _idle(client.status()), 10.0, "the ranks have nothing to do")
    return [model for rank in ranks for model in rank.models]


def _idle(status: Status) -> tuple[RankStatus, ...]:
    """The ranks, if all of them hold something and none is at work."""
    working = status.state != "idle" or any(rank.progress.phase or not rank.models for rank in status.ranks)
    return () if working else status.ranks


def work(path: Path, layout: str) -> int:
    """The bytes that a rank's tensors take in the step loop."""
    message, tensors = requests.sample(requests.spec(path, layout, ranks=2), Case())
    plan = check_sample(message, describe(tensors), open_checkpoint(path), 2)
    return forward_bytes("WanTransformer3DModel", plan, 0, 4)


def matches(client: Client, spec: ModelSpec) -> bool:
    """Whether the backend samples what one process does."""
    got = client.call(*requests.sample(spec, Case()))["samples"]
    return requests.relative_error(got, requests.stock_sample(SIZES, Case())) <= 1e-5


@pytest.mark.long
def test_one_part_leaves_for_another_and_a_decode_without_room_costs_nothing(
    runtime: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, spec = open_checkpoint(path), requests.spec(path, "cfg=2", ranks=2)
    whole = transformer_bytes(checkpoint, "transformer") + 2 * work(path, "cfg=2")
    client = backend(runtime, monkeypatch, whole)
    client.call(EncodeText(model=spec), TEXT)
    assert matches(client, spec)
    before, pids = loaded(client), [rank.pid for rank in client.status().ranks]
    with pytest.raises(NoRoom) as refused:
        client.call(Decode(model=spec), {"latent": torch.ones(1, 16, 3, 64, 64)})
    assert str(refused.value).startswith(f"rank 0 (cpu) has room for {whole / 1e6:.2f} MB by {env.MEMORY_LIMIT}, ")
    assert str(refused.value).endswith("set a tile in Parallel VAE Decode or Encode, or use more devices")
    assert loaded(client) == before
    assert [rank.pid for rank in client.status().ranks] == pids
    assert matches(client, spec)
    assert client.call(Decode(model=spec), {"latent": torch.ones(1, 16, 1, 2, 2)})["pixels"].isfinite().all()


def test_a_model_larger_than_a_device_is_shared_and_one_larger_than_all_streams(
    runtime: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = transformer_bytes(open_checkpoint(path), "transformer")
    client, spec = backend(runtime, monkeypatch, 4 * whole // 5), requests.spec(path, ranks=2)
    assert matches(client, spec)
    assert {(str(model.layout), model.note) for model in loaded(client)} == {("ulysses=2 shard_weights", "")}
    client.stop()
    client = backend(runtime, monkeypatch, whole // 5 + 2 * work(path, "cfg=2"))
    assert matches(client, spec)
    assert {"stream from the machine's memory" in model.note for model in loaded(client)} == {True}
    with pytest.raises(NoRoom, match=r"take at least .* MB: raise PARALLEL_DIT_MEMORY_LIMIT, make a smaller"):
        client.call(*requests.sample(spec, Case(size=(9, 31, 41))))
    assert matches(client, spec)
