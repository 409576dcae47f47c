"""What the lab adds to ranks, which import it where ``PARALLEL_DIT_LAB`` names it."""

from collections.abc import Iterator
from contextlib import contextmanager

from parallel_backend import env

MODULE = "lab.engine.engine"


@contextmanager
def lab_ranks() -> Iterator[None]:
    """Let the backends that start in this context have the lab's ranks."""
    with env.changed({env.LAB.name: MODULE}):
        yield
