"""Holding a layout to the stock forward: that in this process, the layout on ranks of a backend of its own."""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...checkpoint.checkpoint import Checkpoint
from ...client.client import Client
from ...client.temporary_backend import temporary_backend
from ...denoiser.plan import DenoisingPlan
from ...engine.validation import check_forward
from ...errors import InvalidRequest
from ...interfaces.family import Family
from ...interfaces.strategy import Parameters
from ...layout.parallel_layout import ParallelLayout
from ...protocol.messages import Devices, DType, Forward, ModelSpec, RankStatus
from ...protocol.tensors import DTYPES, describe
from ...strategies import STRATEGIES, stage_cut
from . import examples

TOLERANCE = 1e-4
"""Relative error in float32 up to which a layout counts as equal to one process."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Whether a layout gives what the stock forward does.

    Attributes:
        model: a checkpoint's folder; ``dtype``: that to compute in, never ``auto``; ``parameters``: of its blocks;
            ``stages``: where its attention is, see ``Job``.
        inputs: by branch; ``stock``: the stock forward of one.
    """

    title: str
    model: Path
    layout: ParallelLayout
    inputs: Sequence[Mapping[str, Tensor]]
    stock: Callable[[int], Tensor]
    parameters: Parameters
    stages: tuple[tuple[int, ...], ...] = ()
    dtype: DType = "float32"
    tolerance: float = TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a question. Errors are the largest over all branches; ``skipped`` is why it cannot exist.

    ``memory_per_rank`` is in bytes, of the device, or of the process where the device is the CPU. Seconds are None
    where they were not asked for.
    """

    cell: str
    skipped: str | None = None
    tolerance: float = TOLERANCE
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    bytes_sent_per_rank: tuple[int, ...] = ()
    bytes_formula_per_rank: tuple[int, ...] = ()
    memory_per_rank: tuple[int, ...] = ()
    seconds_per_step: float | None = None
    seconds_per_step_one_rank: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it differs from one process, or sends other than the formulas say."""
        if self.skipped:
            return False
        return not self.max_rel_error <= self.tolerance or self.bytes_sent_per_rank != self.bytes_formula_per_rank


class Verifier:
    """Asks a backend."""

    def __init__(self, client: Client, devices: Devices) -> None:
        self.client, self.devices = client, devices

    def ask(self, question: Question, *, time: bool = False) -> Report:
        """Compare; ``time`` measures steps of the layout and of one rank as well."""
        try:
            formula = self._formula(question)
        except InvalidRequest as error:
            return Report(cell=question.title, skipped=str(error))
        # The stock forward may take longer than a backend waits for work: the questions to it come after.
        wanted = [question.stock(i) for i in range(len(question.inputs))]
        answer = self._call(question)
        errors = [(answer[str(i)].float() - one.float()).abs().max() for i, one in enumerate(wanted)]
        return Report(
            cell=question.title,
            tolerance=question.tolerance,
            max_abs_error=float(max(errors)),
            max_rel_error=max(float(e / one.float().abs().max()) for e, one in zip(errors, wanted, strict=True)),
            bytes_sent_per_rank=tuple(answer["sent_bytes"].tolist()),
            bytes_formula_per_rank=formula,
            memory_per_rank=tuple(map(_memory, self.client.status().ranks[: question.layout.ranks])),
            seconds_per_step=self._seconds(question) if time else None,
            seconds_per_step_one_rank=self._seconds(replace(question, layout=ParallelLayout())) if time else None,
        )

    def _seconds(self, question: Question) -> float:
        """The median of three steps, after one that loads."""
        taken = [float(self._call(question, measure=False)["seconds"]) for _ in range(4)]
        return statistics.median(taken[1:])

    def _formula(self, question: Question) -> tuple[int, ...]:
        """The bytes that each rank should send."""
        message = self._message(question)
        job = check(message, question.inputs).workload(
            itemsize=DTYPES[question.dtype].itemsize, parameters=question.parameters, stages=question.stages
        )
        return tuple(
            sum(strategy.bytes_sent(question.layout, job, rank) for strategy in STRATEGIES)
            for rank in range(question.layout.ranks)
        )

    def _call(self, question: Question, *, measure: bool = True) -> dict[str, Tensor]:
        message = replace(self._message(question), measure=measure)
        return self.client.call(message, examples.branches(question.inputs))

    def _message(self, question: Question) -> Forward:
        return forward(question.model, question.dtype, question.layout, self.devices, len(question.inputs))


def forward(model: Path, dtype: DType, layout: ParallelLayout, devices: Devices, branches: int) -> Forward:
    """The request for a timed and measured call."""
    spec = ModelSpec(path=str(model), devices=devices, dtype=dtype, layout=layout)
    return Forward(model=spec, branches=branches, measure=True, timed=True)


def check(message: Forward, inputs: Sequence[Mapping[str, Tensor]]) -> DenoisingPlan:
    """What a request comes to; loads nothing.

    Raises:
        InvalidRequest: it cannot be carried out; names what would work.
    """
    metas, checkpoint = describe(examples.branches(inputs)), Checkpoint.open(message.model.path)
    return check_forward(message, metas, checkpoint, len(message.model.devices.indices))


@contextmanager
def verifier(devices: Devices) -> Iterator[Verifier]:
    """A ``Verifier`` on a backend of its own with these devices, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, temporary_backend(Path(folder)) as client:
        yield Verifier(client, devices)


def block_parameters(family: Family) -> Parameters:
    """Shapes of the weights of all blocks."""
    modules = [module for block in family.blocks for module in block.modules]
    return tuple((tuple(p.shape), p.itemsize) for module in modules for p in module.parameters())


def stages_of(family: Family, layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
    """See ``Job.stages``; none where the family has too few blocks for the layout, which is refused."""
    if not 1 < layout.pipe <= family.geometry.layers:
        return ()
    return stage_cut.sites(family, layout.balance or (1.0,) * layout.pipe)


def _memory(rank: RankStatus) -> int:
    return rank.device_memory or rank.memory
