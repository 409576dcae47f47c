"""A request while a rank carries it out."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..distributed.collectives import agree
from ..distributed.mesh import Axis
from ..distributed.sent_bytes import Measurement
from ..errors import InvalidRequest
from ..loading.components import ComponentCache
from ..progress import LOADING, PROGRESS
from ..protocol.frames import TensorMeta
from ..protocol.messages import MeasuredRequest, Progress, RankRequest
from ..step_loop.sampling_context import Report
from .tensor_values import first_not_finite

Tensors = dict[str, Tensor]

NextStep = Callable[[Mapping[str, Tensor]], Tensors | None]


def no_step(results: Mapping[str, Tensor]) -> Tensors | None:
    """Ask for no further step."""
    return None


M = TypeVar("M", bound=RankRequest)


@dataclass(frozen=True, kw_only=True)
class ActiveRequest(Generic[M]):
    """The arguments of ``Engine.handle``.

    Attributes:
        tensors: all of the request's, on rank 0; None on other ranks.
        received: names of the tensors that came with this request.
        next_step: answers with results, and returns the tensors of the next step; None if the client asks for none.
            Only rank 0 has a client, so on other ranks it does nothing and returns None.
    """

    message: M
    metas: tuple[TensorMeta, ...]
    tensors: Mapping[str, Tensor] | None
    received: Collection[str]
    report: Report
    cancelled: Callable[[], bool]
    next_step: NextStep = no_step

    @contextmanager
    def loading(self, components: ComponentCache, component: str) -> Iterator[None]:
        """Report the start and the end of loading, if the component is not loaded yet."""
        loads = not components.parts.has(component)
        if loads:
            self.report_loading()
        with PROGRESS.phase(LOADING):
            yield
        if loads:
            self.report(Progress(phase="loading", value=1, total=1), {})

    def report_loading(self) -> None:
        """Report the start of loading."""
        self.report(Progress(phase="loading", value=0, total=1), {})

    def check_finite(self, axis: Axis) -> None:
        """Refuse NaN and infinity, on all ranks of ``axis`` alike.

        Raises:
            InvalidRequest: a tensor holds NaN or infinity. The message names the first.
        """
        index = agree(self.first_not_finite(), axis)
        if index >= 0:
            raise self.not_finite(index)

    def first_not_finite(self) -> int:
        """Return the place of the first received tensor that holds NaN or infinity; -1 if none does."""
        tensors = self.tensors or {}
        bad = first_not_finite({name: tensors[name] for name in self.received})
        return -1 if bad < 0 else [meta.name for meta in self.metas].index(list(self.received)[bad])

    def not_finite(self, place: int) -> InvalidRequest:
        """Return the refusal of the tensor at this place."""
        return InvalidRequest(f"{self.metas[place].name} holds NaN or infinity: check the node that made it")


def measured(message: MeasuredRequest, axis: Axis, device: torch.device) -> AbstractContextManager[Measurement | None]:
    """Times the work of a message that asks for it, and counts the bytes sent; otherwise does nothing."""
    return Measurement(axis, device, count=message.measure == "bytes") if message.measure else nullcontext()
