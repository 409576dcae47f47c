"""A rank that is killed while the VAE works, or while weights are freed."""

from collections.abc import Iterator

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import RankFailed
from parallel_backend.protocol.messages import Decode, Encode, RankRequest, Unload
from scripts import processes
from scripts.processes import wait_until
from tests.support import tiny

from .conftest import runtime_folder
from .losing_rank import SIGNALS, UNLOAD
from .real_ranks import Call, Tensors, let_die, model, start

LONG = pytest.mark.long
LATENT, PIXELS = (1, 16, 2, 6, 4), (1, 5, 48, 32, 3)
"""Sizes that the VAE works on in more than one step."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with runtime_folder() as folder:
        yield start(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("tiny") / "model", tiny.Tiny()))


def vae_request(kind: type[Decode] | type[Encode], path: str) -> tuple[RankRequest, Tensors]:
    torch.manual_seed(0)
    inputs = {"latent": torch.randn(LATENT)} if kind is Decode else {"pixels": torch.rand(PIXELS)}
    return kind(model=model(path, None, 2)), inputs


def rank_pids(client: Client) -> set[int]:
    return {rank.pid for rank in client.status().ranks}


def processes_left(client: Client) -> set[int]:
    return {process.pid for process in processes.processes_of(client.endpoint.folder)}


@pytest.mark.parametrize(("kind", "rank"), [(Decode, 1), pytest.param(Encode, 0, marks=LONG)])
def test_a_rank_killed_in_the_vae_costs_one_more_request(
    client: Client, path: str, kind: type[Decode] | type[Encode], rank: int
) -> None:
    message, inputs = vae_request(kind, path)
    wanted = client.call(message, inputs)
    before = client.status()
    let_die(client, (rank, 1))
    call = Call(client=client)
    got = call.run(message, inputs)
    assert not (client.endpoint.folder / SIGNALS).read_text(), "the rank got its signal"
    (said,) = call.said
    assert said.startswith(f"asking again, since rank {rank} (pid {before.ranks[rank].pid}) was killed by SIGKILL")
    assert [torch.equal(got[name], wanted[name]) for name in wanted] == [True]
    assert client.status().generation == before.generation + 1
    assert not processes_left(client) & {status.pid for status in before.ranks}


@LONG
def test_a_rank_killed_in_an_unload_frees_everything(client: Client, path: str) -> None:
    """The request says what happened, and asking again needs no rank: there is nothing left to free."""
    message, inputs = vae_request(Decode, path)
    wanted = client.call(message, inputs)["pixels"]
    dead = rank_pids(client)
    let_die(client, (0, UNLOAD))  # the others do not wait for each other
    with pytest.raises(RankFailed, match="was killed by SIGKILL"):
        client.call(Unload(model=message.model))
    wait_until(lambda: not client.status().ranks, 5.0, "the set has ended")
    generation = client.status().generation
    let_die(client)
    assert Call(client=client).run(Unload(model=message.model), {}) == {}
    assert client.status().generation == generation, "no rank was started to free nothing"
    assert torch.equal(client.call(message, inputs)["pixels"], wanted)
    assert not processes_left(client) & dead
