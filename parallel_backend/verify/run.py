"""Comparing layouts with the stock forward, which runs in this process; the layouts run on a temporary backend."""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ..checkpoint.opening import open_checkpoint
from ..client.client import Client
from ..client.temporary_backend import temporary_backend
from ..denoiser.plan import DenoisingPlan
from ..engine.validation import check_forward
from ..errors import InvalidRequest
from ..interfaces.family import Family
from ..interfaces.strategy import ParameterShapes
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..protocol.messages import Forward, Measure
from ..protocol.model_spec import Compile, Devices, DType, ModelSpec
from ..protocol.status import RankStatus
from ..protocol.tensors import DTYPES, describe
from ..strategies import STRATEGIES, stage_cut
from . import examples
from .report import TOLERANCE, Report


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One layout to compare with the stock forward.

    Attributes:
        title: names it in reports.
        model: a checkpoint's folder.
        layout: the layout.
        inputs: by branch.
        stock: returns the stock forward's prediction for a branch.
        parameters: shapes of the weights of all blocks.
        stages: attention sites of each stage, see ``Workload.stages``.
        dtype: dtype to compute in, never ``auto``.
        tolerance: largest relative error that counts as equal.
        compile: whether the ranks compile the blocks.
    """

    title: str
    model: Path
    layout: ParallelLayout
    inputs: Sequence[Mapping[str, Tensor]]
    stock: Callable[[int], Tensor]
    parameters: ParameterShapes
    stages: tuple[tuple[int, ...], ...] = ()
    dtype: DType = "float32"
    tolerance: float = TOLERANCE
    compile: Compile = "off"


class Verifier:
    """Runs comparisons on a backend."""

    def __init__(self, client: Client, devices: Devices) -> None:
        self.client, self.devices = client, devices

    def compare(self, comparison: Comparison, *, time: bool = False) -> Report:
        """Compare a layout with the stock forward; with ``time``, also time steps of the layout and of one rank."""
        try:
            plain = replace(comparison, compile="off")
            formula = self._formula(plain)
        except InvalidRequest as error:
            return Report(cell=comparison.title, skipped=str(error))
        # The stock forward comes first: it may take longer than a backend waits for work before it ends.
        expected = [comparison.stock(i) for i in range(len(comparison.inputs))]
        counted = self._call(plain)
        reply = counted if comparison.compile == "off" else self._call(comparison, "seconds")
        errors = [(reply[str(i)].float() - one.float()).abs().max() for i, one in enumerate(expected)]
        return Report(
            cell=comparison.title,
            tolerance=comparison.tolerance,
            max_abs_error=float(max(errors)),
            max_rel_error=max(float(e / one.float().abs().max()) for e, one in zip(errors, expected, strict=True)),
            bytes_sent_per_rank=tuple(counted["sent_bytes"].tolist()),
            bytes_formula_per_rank=formula,
            memory_per_rank=tuple(map(_memory, self.client.status().ranks[: comparison.layout.ranks])),
            seconds_per_step=self._seconds(comparison) if time else None,
            seconds_per_step_one_rank=self._seconds(replace(comparison, layout=ParallelLayout())) if time else None,
        )

    def _seconds(self, comparison: Comparison) -> float:
        """Median seconds of three steps, after one that loads the model."""
        seconds = [float(self._call(comparison, "seconds")["seconds"]) for _ in range(4)]
        return statistics.median(seconds[1:])

    def _formula(self, comparison: Comparison) -> tuple[int, ...]:
        """The bytes that each rank should send."""
        workload = plan(self._message(comparison), comparison.inputs).workload(
            itemsize=DTYPES[comparison.dtype].itemsize, parameters=comparison.parameters, stages=comparison.stages
        )
        return tuple(
            sum(strategy.bytes_sent(comparison.layout, workload, rank) for strategy in STRATEGIES)
            for rank in range(comparison.layout.ranks)
        )

    def _call(self, comparison: Comparison, measure: Measure = "bytes") -> dict[str, Tensor]:
        message = replace(self._message(comparison), measure=measure)
        return self.client.call(message, examples.branches(comparison.inputs))

    def _message(self, comparison: Comparison) -> Forward:
        message = forward_request(
            comparison.model, comparison.dtype, comparison.layout, self.devices, len(comparison.inputs)
        )
        return replace(message, model=replace(message.model, compile=comparison.compile))


def forward_request(model: Path, dtype: DType, layout: ParallelLayout, devices: Devices, branches: int) -> Forward:
    """Return the request for one forward that is timed and whose bytes are counted."""
    spec = ModelSpec(path=str(model), devices=devices, dtype=dtype, layout=layout)
    return Forward(model=spec, branches=branches, measure="bytes")


def plan(message: Forward, inputs: Sequence[Mapping[str, Tensor]]) -> DenoisingPlan:
    """Plan a request without loading anything.

    Raises:
        InvalidRequest: the request is impossible; the message names what would work.
    """
    metas, checkpoint = describe(examples.branches(inputs)), open_checkpoint(message.model.path)
    return check_forward(message, metas, checkpoint, len(message.model.devices.indices))


@contextmanager
def verifier(devices: Devices) -> Iterator[Verifier]:
    """Yield a ``Verifier`` on a temporary backend with these devices."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, temporary_backend(Path(folder)) as client:
        yield Verifier(client, devices)


def block_parameters(family: Family) -> ParameterShapes:
    """Return the shapes of the weights of all blocks."""
    modules = [module for block in family.blocks for module in block.modules]
    return tuple((tuple(p.shape), p.itemsize) for module in modules for p in module.parameters())


def stages_of(family: Family, layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
    """Return ``Workload.stages``; empty if the layout has one stage, or more than the family has blocks."""
    if not 1 < layout.pipe <= family.geometry.layers:
        return ()
    return stage_cut.sites(family, Split.of(layout).stages)


def _memory(rank: RankStatus) -> int:
    return rank.device_memory or rank.memory
