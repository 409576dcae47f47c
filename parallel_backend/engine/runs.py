"""The requests that repeat: each step of a sampler that runs in ComfyUI asks for the same with another latent."""

from collections import OrderedDict
from collections.abc import Hashable

from .denoising import Denoising

MOST = 4
"""Runs that may take turns, such as two models in one workflow, or a sampler in a sampler."""


class Runs:
    """The most recently used runs of this rank. Ranks may have different ones."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, Denoising] = OrderedDict()  # the least recently used first

    def get(self, key: Hashable) -> Denoising | None:
        """Return the run of a key."""
        return self._runs.get(key)

    def take(self, key: Hashable) -> Denoising:
        """Return the run of a key, which is about to be carried out, and which ``clear`` therefore may not release."""
        return self._runs.pop(key)

    def put(self, key: Hashable, run: Denoising) -> None:
        """Keep a run. The least recently used one leaves."""
        self._release(key)
        run.keep()
        self._runs[key] = run
        if len(self._runs) > MOST:
            self._release(next(iter(self._runs)))

    def clear(self) -> None:
        """Forget all runs."""
        for key in list(self._runs):
            self._release(key)

    def _release(self, key: Hashable) -> None:
        if key in self._runs:
            self._runs.pop(key).release()
