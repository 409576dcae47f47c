"""A backend for one measurement, beside the one that a user's ComfyUI may be using."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import BackendUnavailable
from ..protocol.endpoint import Endpoint
from .client import Client

IDLE_TIMEOUT = 300.0
"""Seconds without work after which it ends by itself, should nobody be left to end it; peers take turns meanwhile."""


@contextlib.contextmanager
def temporary_backend(folder: Path) -> Iterator[Client]:
    """A backend in a runtime folder inside ``folder``, whose CPU ranks have one thread each; ended afterwards."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    client = Client(endpoint=Endpoint(folder=folder / "run"), idle_timeout=IDLE_TIMEOUT)
    try:
        client.start()
        yield client
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        with contextlib.suppress(BackendUnavailable):
            client.stop()
