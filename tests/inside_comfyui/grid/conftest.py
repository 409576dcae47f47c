"""Backends of one, two and three ranks, and the largest differences, which the end of the run lists."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import new_session, relative_error

LIMIT = 1e-4
RANKS = (1, 2, 3)
_differences: dict[str, list[float]] = defaultdict(list)
"""Every relative difference, by what was compared."""

Compare = Callable[[str, str, torch.Tensor, torch.Tensor], None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the largest differences."""
    for subject, values in sorted(_differences.items()):
        terminalreporter.write_line(f"{subject}: {len(values)} results, largest difference {max(values):.1e}")


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, FreeingClient]]:
    """A backend for each number of ranks, so that none restarts for another number."""
    clients = {ranks: FreeingClient(tmp_path_factory.mktemp(f"run{ranks}"), idle_timeout=600.0) for ranks in RANKS}
    for client in clients.values():
        client.start()
    yield clients
    for client in clients.values():
        client.stop()


@pytest.fixture
def use_ranks(backends: dict[int, FreeingClient]) -> Iterator[Callable[[int], str]]:
    """``use_ranks(n)`` sends requests to the backend of n ranks and returns its ``devices``.

    The test's weights are freed after it: those of all families in six ranks do not fit into memory.
    """

    def use(ranks: int) -> str:
        new_session(backends[ranks])
        return ",".join(map(str, range(ranks)))

    yield use
    for client in backends.values():
        client.free()
    gc.collect()  # ComfyUI's executor and its models are part of cycles


@pytest.fixture
def compare() -> Iterator[Compare]:
    """``compare(subject, what, ours, reference)`` records a difference. The test fails if one exceeds the limit."""
    too_large: list[str] = []

    def record(subject: str, what: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
        assert ours.shape == reference.shape
        difference = relative_error(ours, reference)
        _differences[subject].append(difference)
        if not difference <= LIMIT:
            too_large.append(f"{what}: {difference:.1e}")

    yield record
    assert not too_large, "; ".join(too_large)
