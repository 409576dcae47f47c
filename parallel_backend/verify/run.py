"""Running cells of the matrix: the stock forward in this process, the layout on ranks of a backend of its own."""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint
from ..client import Client
from ..errors import InvalidRequest
from ..layout import ParallelLayout
from ..messages import Devices, Forward, ModelSpec
from ..models import FAMILIES
from ..own_backend import own_backend
from ..payload import describe
from ..strategies import STRATEGIES
from ..strategies.base import Parameters
from ..validation import check_forward
from . import examples
from .matrix import Cell

TOLERANCE = 1e-4
"""Relative error in float32 up to which a layout counts as equal to one process."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a cell. Errors are the largest over all branches; ``skipped`` is why it cannot exist."""

    cell: str
    skipped: str | None = None
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    bytes_sent_per_rank: tuple[int, ...] = ()
    bytes_formula_per_rank: tuple[int, ...] = ()
    memory_per_rank: tuple[int, ...] = ()
    seconds_per_step: float = 0.0
    seconds_per_step_one_rank: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it differs from one process, or sends other than the formulas say."""
        if self.skipped:
            return False
        return not self.max_rel_error <= TOLERANCE or self.bytes_sent_per_rank != self.bytes_formula_per_rank


class Verifier:
    """Keeps a backend and the models of the variants that it has met."""

    def __init__(self, client: Client, folder: Path, devices: Devices) -> None:
        self.client, self.folder, self.devices = client, folder, devices

    def run(self, cell: Cell, *, time: bool = False) -> Report:
        """Compare one cell."""
        inputs = _inputs(cell)
        try:
            answer, formula = self._call(cell, inputs)
        except InvalidRequest as error:
            return Report(cell=str(cell), skipped=str(error))
        module = _module(cell.class_name, cell.variant)
        wanted = [_stock(cell, module, branch) for branch in inputs]
        errors = [(answer[str(i)] - one).abs().max() for i, one in enumerate(wanted)]
        return Report(
            cell=str(cell),
            max_abs_error=float(max(errors)),
            max_rel_error=max(float(e / one.abs().max()) for e, one in zip(errors, wanted, strict=True)),
            bytes_sent_per_rank=tuple(answer["sent_bytes"].tolist()),
            bytes_formula_per_rank=formula,
            memory_per_rank=tuple(rank.memory for rank in self.client.status().ranks[: cell.layout.ranks]),
            seconds_per_step=self._seconds(cell, inputs) if time else 0.0,
            seconds_per_step_one_rank=self._seconds(replace(cell, layout=ParallelLayout()), inputs) if time else 0.0,
        )

    def _seconds(self, cell: Cell, inputs: list[dict[str, Tensor]]) -> float:
        """The median of three steps, after one that loads."""
        taken = [float(self._call(cell, inputs)[0]["seconds"]) for _ in range(4)]
        return statistics.median(taken[1:])

    def _call(self, cell: Cell, inputs: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        path = self._path(cell.class_name, cell.variant)
        spec = ModelSpec(path=str(path), devices=self.devices, dtype="float32", layout=cell.layout)
        message = Forward(model=spec, branches=len(inputs), measure=True)
        tensors = examples.branches(inputs)
        plan = check_forward(message, describe(tensors), Checkpoint.open(path), len(self.devices.indices))
        job = plan.job(parameters=_parameters(cell.class_name, cell.variant))
        formula = tuple(
            sum(strategy.bytes_sent(cell.layout, job, rank) for strategy in STRATEGIES)
            for rank in range(cell.layout.ranks)
        )
        return self.client.call(message, tensors), formula

    def _path(self, class_name: str, name: str) -> Path:
        path = self.folder / f"{class_name} {name}"
        return path if path.is_dir() else examples.write(path, _module(class_name, name))


@contextmanager
def verifier(ranks: int) -> Iterator[Verifier]:
    """A ``Verifier`` on a backend of its own with so many CPU ranks, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, own_backend(Path(folder)) as client:
        yield Verifier(client, Path(folder), Devices(kind="cpu", indices=tuple(range(ranks))))


def _inputs(cell: Cell) -> list[dict[str, Tensor]]:
    """Two branches that differ in length where guidance is split, else one."""
    variant = examples.variant(cell.class_name, cell.variant)
    text = cell.text or variant.text
    shorter = text if variant.fixed_text else max(1, text - 2)
    lengths: Sequence[int] = (text, shorter) if cell.layout.cfg > 1 else (text,)
    return [
        examples.inputs(cell.class_name, cell.variant, batch=cell.batch, size=cell.size, text=length, seed=i)
        for i, length in enumerate(lengths)
    ]


def _stock(cell: Cell, module: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return FAMILIES[cell.class_name](module).stock(inputs)


@lru_cache(maxsize=2)
def _module(class_name: str, name: str) -> Any:
    return examples.module(class_name, name)


def _parameters(class_name: str, name: str) -> Parameters:
    blocks = FAMILIES[class_name](_module(class_name, name)).blocks
    modules = [module for block in blocks for module in block.modules]
    return tuple((tuple(p.shape), p.itemsize) for module in modules for p in module.parameters())
