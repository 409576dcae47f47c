"""A backend of fake ranks that a module's tests abuse, and that has to be unharmed after each of them."""

from collections.abc import Iterator

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.protocol.messages import Trial
from scripts.processes import wait_until
from tests.faults.backend import TWO_RANKS, start_fake
from tests.faults.conftest import runtime, runtime_folder

__all__ = ["backend", "client", "runtime"]

MEMORY = 16 << 20
"""Bytes by which the supervisor may grow in a test."""


@pytest.fixture(scope="module")
def backend() -> Iterator[Client]:
    """The backend of the tests of a module, whose ranks have started."""
    with runtime_folder() as folder:
        client = start_fake(folder)
        client.call(Trial(name="echo", model=TWO_RANKS), {})
        yield client


@pytest.fixture
def client(backend: Client) -> Iterator[Client]:
    """The backend. After the test, the same processes answer at once, have kept their size, and do a good request."""
    before = backend.status()
    yield backend
    wait_until(lambda: backend.status().state == "idle", 5.0, "the backend is idle")
    after = backend.status()
    assert after.pid == before.pid
    assert after.internal_errors == 0
    assert after.memory - before.memory < MEMORY
    sent = {"x": torch.arange(4.0)}
    assert torch.equal(backend.call(Trial(name="echo", model=TWO_RANKS), sent)["x"], sent["x"])
    assert [rank.pid for rank in backend.status().ranks] == [rank.pid for rank in before.ranks]
