"""Samples of a number that rises and falls, such as the memory of processes, while something else works."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 0.02
"""Seconds between two samples."""
PATIENCE = 10.0
"""Seconds that the last sample may take."""


@contextmanager
def sampled(measure: Callable[[], int]) -> Iterator[list[tuple[float, int]]]:
    """Call ``measure`` in a thread, and once more at the end: a growing list of (monotonic time, number)."""
    samples: list[tuple[float, int]] = []
    end = threading.Event()

    def sample() -> None:
        samples.append((time.monotonic(), measure()))

    def loop() -> None:
        while not end.wait(INTERVAL):
            sample()

    sampler = threading.Thread(target=loop, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        end.set()
        sampler.join(PATIENCE)
        sample()
