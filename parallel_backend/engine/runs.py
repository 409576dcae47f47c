"""The requests that repeat: each step of a sampler that runs in ComfyUI asks for the same with another latent."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..protocol.frames import TensorMeta
from ..protocol.messages import CHANGING, Forward
from .denoising import Denoising

MOST = 4
"""Runs that may take turns, such as two models in one workflow, or a sampler in a sampler."""


def run_key(message: Forward, metas: Sequence[TensorMeta]) -> Hashable | None:
    """Return what the steps of a run have in common; None if nothing says that their other tensors are the same."""
    if any(_changes(meta) != (not meta.digest) for meta in metas if not meta.same):
        return None
    return replace(message, request_id="-"), tuple(metas)


def _changes(meta: TensorMeta) -> bool:
    return meta.name.partition(".")[2] in CHANGING


class Runs:
    """The most recently used runs of this rank. Ranks may have different ones."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Hashable, Denoising] = OrderedDict()  # the least recently used first

    def get(self, key: Hashable) -> Denoising | None:
        """Return the run of a key."""
        if key in self._runs:
            self._runs.move_to_end(key)
        return self._runs.get(key)

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
