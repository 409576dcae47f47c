"""The engine of the lab's ranks: the product's, with additions for measurements and tests.

It echoes tensors and slows ranks down. It measures the memory of a decode, without clamping the pixels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_backend import env
from parallel_backend.distributed.collectives import gather_numbers
from parallel_backend.engine.engine import Engine
from parallel_backend.engine.request import NextStep, no_step
from parallel_backend.errors import Cancelled, InvalidRequest, NoRoom
from parallel_backend.loading.components import ComponentCache
from parallel_backend.protocol.frames import TensorMeta
from parallel_backend.protocol.messages import Decode, Encode, RankRequest, Trial
from parallel_backend.protocol.model_spec import ModelSpec
from parallel_backend.step_loop.sampling_context import Report

from .echo import ECHO, echo
from .handicap import handicap, handicapped, slow_down, slowed
from .peak_memory import PeakMemory
from .unclamped import Unclamped


class LabEngine(Engine):
    """See ``Engine``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if env.HANDICAP.is_set():
            measured = self._meshes.speeds
            self._meshes.speeds = lambda: handicapped(measured())  # type: ignore[method-assign]

    def handle(
        self,
        message: RankRequest,
        metas: tuple[TensorMeta, ...],
        tensors: Mapping[str, Tensor] | None,
        *,
        report: Report,
        cancelled: Callable[[], bool],
        next_step: NextStep = no_step,
    ) -> dict[str, Tensor]:
        """Carry out one request, see ``Engine.handle``.

        ``Trial`` also knows ``echo``. A rank with a handicap takes longer for the blocks of a transformer, for a
        probe, and for all of a ``Decode`` or ``Encode`` that does not count bytes. One that does also returns
        ``grown_bytes`` ``[ranks]`` int64, by how much each rank's peak memory exceeds its memory before; pixels are not
        clamped.
        """
        if isinstance(message, Trial) and message.name == ECHO:
            return echo(message, tensors, report)
        if isinstance(message, Trial):  # a probe finds a slower rank
            with slowed(handicap(self.rank), self.device):
                return super().handle(message, metas, tensors, report=report, cancelled=cancelled)
        if not isinstance(message, Decode | Encode):
            return super().handle(message, metas, tensors, report=report, cancelled=cancelled, next_step=next_step)
        if message.measure != "bytes":
            with slowed(handicap(self.rank), self.device):
                return super().handle(message, metas, tensors, report=report, cancelled=cancelled)
        refusal, results = None, dict[str, Tensor]()
        with Unclamped(), PeakMemory(self.device) as peak:
            try:
                results = super().handle(message, metas, tensors, report=report, cancelled=cancelled)
            except (InvalidRequest, Cancelled, NoRoom) as error:
                refusal = error  # ranks outside of the request do not know of the error, and wait below
        grown = [number for (number,) in gather_numbers([peak.bytes], self._agreements.world)]
        if refusal:
            raise refusal
        return results | ({} if self.rank else {"grown_bytes": torch.tensor(grown)})

    def _components(self, model: ModelSpec) -> ComponentCache:
        components = super()._components(model)
        if env.HANDICAP.is_set() and "get" not in vars(components.transformers):
            slow_down(components.transformers, self.device)
        return components
