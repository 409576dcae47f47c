"""What a rank needs of its engine, so that tests can put another one in its place."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..engine.elsewhere import Elsewhere
    from ..engine.engine import OwnTrial
    from ..engine.planned import Planner
    from ..engine.request import NextStep, Tensors
    from ..protocol.frames import TensorMeta
    from ..protocol.messages import RankRequest
    from ..protocol.status import LoadedModel
    from ..step_loop.sampling_context import Report


class RankEngine(Protocol):
    """See ``engine.Engine``, whose docstrings apply."""

    device: "torch.device"
    elsewhere: "Elsewhere | None"
    trials: "Mapping[str, OwnTrial]"
    planner: "Planner | None"

    def handle(
        self,
        message: "RankRequest",
        metas: "tuple[TensorMeta, ...]",
        tensors: "Mapping[str, torch.Tensor] | None",
        *,
        report: "Report",
        cancelled: Callable[[], bool],
        next_step: "NextStep",
    ) -> "Tensors":
        """Carry out one request."""

    def rest(self) -> None:
        """Free what is kept for a request that has not come."""

    def snapshot(self) -> "tuple[tuple[LoadedModel, ...], int, int]":
        """Loaded models, bytes of device memory, and number of transformer forwards."""

    def kept_names(self, message: "RankRequest", metas: "tuple[TensorMeta, ...]") -> tuple[str, ...]:
        """Return the names of a request's tensors that this rank has."""
