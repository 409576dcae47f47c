"""The step cache of a run whose steps are requests: rank 0 decides and keeps predictions, the others follow it."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ..denoiser.change_gate import ChangeGate
from ..denoiser.denoiser import Denoiser, Inputs
from ..distributed.collectives import agree
from ..interfaces.geometry import TIMESTEP
from ..protocol.messages import FORECASTS, POSITION
from ..step_cache.history import StepHistory
from ..step_cache.schedule import Moment
from ..step_cache.settings import StepCache
from .request import Tensors

Shards = Callable[[Mapping[int, Inputs]], dict[int, Tensor] | None]
"""Predicts what ``Denoiser.shards`` does; None if the step is to be forecast."""


class CachedRun:
    """Answers the steps of one run, some of them from the predictions that rank 0 has gathered for earlier ones.

    A forecast takes neither weights nor exchanges, so it is the same for every layout.
    """

    def __init__(self, cache: StepCache) -> None:
        self._history = StepHistory[str](cache)
        self._gate: ChangeGate | None = None

    def answer(
        self, tensors: Mapping[str, Tensor] | None, denoiser: Denoiser, compute: Callable[[Shards], Tensors | None]
    ) -> Tensors:
        """Return the results of a step on rank 0, an empty dict on other ranks. Collective over the layout's ranks.

        Args:
            tensors: the request's, on rank 0.
            compute: computes the step by the function that it is given, and returns None if that does. Collective, too.
        """
        moment = None if tensors is None else _moment(tensors, denoiser)
        may = bool(agree(int(moment is not None and self._history.skips(moment)), denoiser.mesh.all_ranks))
        results = None if may and self._history.fixed else compute(self._shards(denoiser, may=may))
        if results is None:
            return {} if moment is None else {**self._history.forecast(moment), FORECASTS: torch.tensor([1, 1])}
        if moment is None:
            return results
        branches = range(denoiser.plan.branches)
        self._history.add(moment, {name: results[name] for name in map(str, branches)})
        return {**results, FORECASTS: torch.tensor([0, 1])}

    def _shards(self, denoiser: Denoiser, *, may: bool) -> Shards:
        if self._history.fixed:
            return denoiser.shards
        plan = denoiser.plan
        self._gate = self._gate or ChangeGate(self._history.cache, denoiser.mesh.all_ranks, plan)
        return partial(denoiser.shards_unless, gate=self._gate, may=may)


def _moment(tensors: Mapping[str, Tensor], denoiser: Denoiser) -> Moment:
    """When a step is, from tensors in the CPU's memory."""
    position, steps = tensors[POSITION].tolist()
    return Moment(position=position, steps=int(steps), model=denoiser.experts.name(tensors[f"0.{TIMESTEP}"]))
