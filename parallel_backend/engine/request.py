"""A request while a rank carries it out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from ..loading.components import ComponentCache
from ..protocol.frames import TensorMeta
from ..protocol.messages import Progress, RankRequest
from ..step_loop.setting import Report

Tensors = dict[str, Tensor]

M = TypeVar("M", bound=RankRequest)


@dataclass(frozen=True, kw_only=True)
class ActiveRequest(Generic[M]):
    """The arguments of ``Engine.handle``."""

    message: M
    metas: tuple[TensorMeta, ...]
    tensors: Mapping[str, Tensor] | None
    report: Report
    cancelled: Callable[[], bool]

    @contextmanager
    def loading(self, pipeline: ComponentCache, component: str) -> Iterator[None]:
        """Say that weights are about to be loaded and that they have been, if they are."""
        loads = not pipeline.has(component)
        if loads:
            self.report(Progress(phase="loading", value=0, total=1), {})
        yield
        if loads:
            self.report(Progress(phase="loading", value=1, total=1), {})
