"""Networks of several hosts on this machine, which needs root and network namespaces: else these tests are skipped."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import tiny

from . import network
from .hosts import Host

NewNetwork = Callable[..., tuple[Host, ...]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder ``machines``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.machines)


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    """Skip the tests of this folder where a network cannot be made."""
    if reason := network.available():
        pytest.skip(f"this machine can hold no network of hosts: {reason}")


@pytest.fixture
def new_network() -> Iterator[NewNetwork]:
    """``new_network("a", "b", rate="20mbit")`` are hosts that reach each other. What is left of them is a failure."""
    with ExitStack() as stack:
        yield lambda *names, **options: stack.enter_context(network.network(names, **options))


@pytest.fixture
def two_hosts(new_network: NewNetwork) -> tuple[Host, ...]:
    """Hosts "alpha" and "beta"."""
    return new_network("alpha", "beta")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan, which all hosts find at the same path."""
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model", tiny.Tiny(heads=3, layers=3))
