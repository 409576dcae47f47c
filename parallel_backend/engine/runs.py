"""The requests that repeat: each step of a sampler that runs in ComfyUI asks for the same with another latent."""

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

from .denoising import Denoising
from .kept_tensors import MAX_BYTES

MOST = 16
"""Runs that may take turns: a sampler in a sampler, windows of a video with a picture each, many regions."""


class Runs:
    """The most recently used runs of this rank. Ranks may have different ones.

    Args:
        max_bytes: of the tensors that the steps of runs have in common.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._runs: OrderedDict[Hashable, Denoising] = OrderedDict()  # the least recently used first

    def get(self, key: Hashable) -> Denoising | None:
        """Return the run of a key."""
        return self._runs.get(key)

    def take(self, key: Hashable) -> Denoising:
        """Return the run of a key, which is about to be carried out, and which ``clear`` therefore may not release."""
        return self._runs.pop(key)

    def put(self, key: Hashable, run: Denoising) -> None:
        """Keep a run. The least recently used ones make room."""
        self._release(key)
        run.keep()
        self._runs[key] = run
        while len(self._runs) > MOST or (len(self._runs) > 1 and self._nbytes > self._max_bytes):
            self._release(next(iter(self._runs)))

    def clear(self) -> None:
        """Forget all runs."""
        for key in list(self._runs):
            self._release(key)

    @property
    def _nbytes(self) -> int:
        """Bytes of the tensors that runs keep, each counted once."""
        kept: dict[int, Tensor] = {id(tensor): tensor for run in self._runs.values() for tensor in run.constant}
        return sum(tensor.nbytes for tensor in kept.values())

    def _release(self, key: Hashable) -> None:
        if key in self._runs:
            self._runs.pop(key).release()
