"""What the lab adds to ranks, which import it where ``PARALLEL_DIT_LAB`` names it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from parallel_backend.inherited import LAB

MODULE = "lab.engine.engine"


@contextmanager
def lab_ranks() -> Iterator[None]:
    """Let the backends that start in this context have the lab's ranks."""
    before = os.environ.get(LAB)
    os.environ[LAB] = MODULE
    try:
        yield
    finally:
        del os.environ[LAB]
        os.environ |= {} if before is None else {LAB: before}
