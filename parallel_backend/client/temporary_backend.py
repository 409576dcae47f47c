"""A backend for one measurement, separate from the one that a user's ComfyUI may be using."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import BackendUnavailable
from ..protocol.endpoint import Endpoint
from .client import Client

IDLE_TIMEOUT = 300.0
"""Seconds without work after which it ends by itself if its client is killed. Long, since contestants take turns."""


@contextlib.contextmanager
def temporary_backend(folder: Path) -> Iterator[Client]:
    """Start a backend in a runtime folder inside ``folder``, with one thread on each CPU rank; stop it at the end."""
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
