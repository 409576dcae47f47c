"""A rank that hangs while its heartbeats go on ends the set with its name and phase; a slow one does not."""

import re
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.client.status_text import format_status
from parallel_backend.errors import RankFailed
from parallel_backend.supervisor.limits import Limits, Patience
from scripts.processes import wait_until

from .backend import Running, sample, start_fake, tensors
from .conftest import runtime_folder

PATIENCE = Patience(progress=3.0, steps=10.0, first=3.0, load=8.0, connect=4.0, compute=60.0, hang=30.0)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A backend that soon gives up on ranks without progress, and waits long for everything else."""
    with runtime_folder() as folder:
        yield start_fake(folder, limits=Limits(patience=PATIENCE, agree=100.0))


@pytest.mark.parametrize(
    ("kind", "rank", "phase", "seconds"),
    [
        ("hang", 1, "sampling (step 3 of 1000)", 3.0),
        ("load", 1, "loading weights (step 3 of 1000)", 8.0),
    ],
)
@pytest.mark.daily(1)
def test_a_hung_rank_is_named_with_its_phase(client: Client, kind: str, rank: int, phase: str, seconds: float) -> None:
    running = Running(client=client, message=sample(f"{kind} {rank}")).in_step()
    pid = client.status().ranks[rank].pid
    error = running.ended(40.0)
    assert isinstance(error, RankFailed)
    named = re.match(rf"rank {rank} \(pid {pid}\) made no progress for (\d+) s while (.*), and the other", str(error))
    assert named, error
    assert float(named[1]) >= seconds
    assert named[2] == phase
    assert str(client.endpoint.rank_log(rank)) in str(error)


def test_ranks_that_cannot_connect_are_told_what_to_try(client: Client) -> None:
    """Rank 1 is silent, because the library that connects keeps Python waiting."""
    error = Running(client=client, message=sample("connect 1")).ended(25.0)
    assert isinstance(error, RankFailed)
    assert re.search(r"rank 1 \(pid \d+\) made no progress for \d+ s while connecting to the other ranks", str(error))
    assert "gloo does not connect these ranks: a firewall" in str(error)


@pytest.mark.parametrize("kind", ["slow", "slowload", "compute"])
@pytest.mark.daily(1)
def test_a_slow_rank_is_left_alone(client: Client, kind: str) -> None:
    """Each takes longer than ``PATIENCE.progress``: in parts, while loading, and without a pause."""
    generation = client.status().generation
    result = client.call(sample(f"{kind} 1"), tensors(4))
    assert torch.equal(result["samples"], tensors(4)["x"] * 2)
    assert client.status().generation in (generation, generation + 1)  # an earlier test may have ended the set


def test_a_refusal_by_one_rank_explains_why_the_other_is_stuck(client: Client) -> None:
    error = Running(client=client, message=sample("alone 1")).ended(40.0)
    assert isinstance(error, RankFailed)
    assert "rank 1 alone ended the request: only I think so" in str(error)


def test_the_status_shows_what_a_rank_does(client: Client) -> None:
    running = Running(client=client, message=sample()).in_step()
    ranks = client.status().ranks
    while not all(rank.progress.step for rank in ranks):
        ranks = client.status().ranks
    assert {rank.progress.phase for rank in ranks} == {"sampling"}
    assert re.search(r"rank 1 .*, sampling \(step \d+ of 1000\), \d+ parts done", format_status(client.status()))
    running.stop.set()
    running.ended(20.0)
    wait_until(lambda: not any(rank.progress.phase for rank in client.status().ranks), 5.0, "every rank is idle")
