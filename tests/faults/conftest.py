"""Runtime folders for tests, which fail if a process outlives them."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_backend.client.client import Client
from scripts import processes
from tests.support.certificates import made

from .backend import start_fake


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket. At the end, its backend is stopped and must be gone."""
    folder = Path(tempfile.mkdtemp(prefix="pdit"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(processes.RUNTIME, str(folder))
        patch.setenv("PARALLEL_DIT_IDLE_TIMEOUT", "120")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder
    processes.stop_backend(folder)
    left = processes.wait_for_exit(folder, 5.0)  # one may be about to end
    described = processes.describe(left)
    processes.kill(left)
    shutil.rmtree(folder)
    assert not left, described


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder for one test."""
    with runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of certificates for a server at 127.0.0.1."""
    return made(tmp_path_factory.mktemp("gateway") / "certificates")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """The client of a fake backend that all tests of a module share, since starting ranks is slow."""
    with runtime_folder() as folder:
        yield start_fake(folder)
