"""Runtime folders for tests, and the promise that nothing of ours outlives them."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parallel_backend.client.client import Client
from parallel_backend.errors import BackendError
from parallel_backend.protocol.endpoint import Endpoint

from .backend import processes, start_fake


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket; at the end its backend is stopped and must be gone."""
    folder = Path(tempfile.mkdtemp(prefix="pdit"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLEL_DIT_RUNTIME", str(folder))
        patch.setenv("PARALLEL_DIT_IDLE_TIMEOUT", "120")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder
    with contextlib.suppress(BackendError):
        Client(endpoint=Endpoint(folder=folder)).stop()
    left = processes(folder)
    described = [(process.pid, process.cmdline()) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder)
    assert not described


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder for one test."""
    with runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A backend for the tests of one file; starting ranks is the slow part."""
    with runtime_folder() as folder:
        yield start_fake(folder)
