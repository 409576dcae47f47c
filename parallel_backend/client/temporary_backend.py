"""A backend for one measurement, separate from the backend of a user's ComfyUI."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .. import env
from ..errors import BackendUnavailable
from ..protocol.endpoint import Endpoint
from .client import Client

IDLE_TIMEOUT = 300.0
"""Seconds without work after which it ends by itself if its client is killed. Long, since contestants take turns."""


@contextlib.contextmanager
def temporary_backend(folder: Path, *, spares: int = 0) -> Iterator[Client]:
    """Start a backend in a runtime folder inside ``folder``, and stop it at the end.

    It has one thread on each CPU rank, and no spare ranks unless their number is given.
    """
    with env.changed({"OMP_NUM_THREADS": "1", env.SPARES.name: str(spares)}):
        client = Client(endpoint=Endpoint(folder=folder / "run"), idle_timeout=IDLE_TIMEOUT)
        try:
            client.start()
            yield client
        finally:
            with contextlib.suppress(BackendUnavailable):
                client.stop()
