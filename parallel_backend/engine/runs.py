"""The requests that repeat: each step of a sampler that runs in ComfyUI asks for the same with another latent."""

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import nullcontext

from ..distributed.mesh import Axis
from ..progress import CLIENT, PROGRESS
from ..protocol.messages import Forward
from .denoising import Denoising
from .request import ActiveRequest, Tensors

MOST = 4
"""Runs that may take turns, such as two models in one workflow, or a sampler in a sampler."""


def further_steps(run: Denoising, request: ActiveRequest[Forward], results: Tensors, world: Axis) -> Tensors:
    """Answer with ``results``, and run the steps that the client then sends. Collective over the world.

    Returns:
        The newest results.
    """
    while request.message.steps:
        with PROGRESS.phase(CLIENT):
            tensors = request.next_step(results)
        with PROGRESS.phase(CLIENT) if world.index else nullcontext():  # the others wait for rank 0's client
            begun = run.begin_step(tensors, world)
        if not begun:
            break
        results = run.step()
    return results


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
