"""The lab's additions to ranks, which import them if ``PARALLEL_DIT_LAB`` names them."""

from collections.abc import Iterator
from contextlib import contextmanager

from parallel_backend import env

MODULE = "lab.engine.engine"


@contextmanager
def lab_ranks() -> Iterator[None]:
    """Give the lab's ranks to backends that start in this context."""
    with env.changed({env.LAB.name: MODULE}):
        yield
