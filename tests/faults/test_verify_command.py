"""``verify`` on a checkpoint and on small models: it passes what is correct, and detects what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallel_backend.denoiser.plan import DenoisingPlan
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.verify.forward.cells import Cells
from parallel_backend.verify.forward.matrix import Cell
from parallel_backend.verify.forward.run import Verifier, verifier
from parallel_backend.verify.loops.run import Loop, LoopCells, wanted

from .backend import TWO_RANKS, run_command


def verify(runtime: Path, *arguments: str) -> dict[str, Any]:
    """The report of a ``verify`` command, which must leave no temporary folder behind."""
    completed = run_command(runtime, "verify", *arguments, "--json", timeout=300, TMPDIR=str(runtime))
    assert completed.returncode == 0, completed.stderr
    assert not list(runtime.glob("verify-*"))
    report: dict[str, Any] = msgspec.json.decode(completed.stdout)
    return report


def test_a_checkpoint_under_one_layout(runtime: Path) -> None:
    report = verify(runtime, "shapes", "--layout", "ring=2")
    assert report["cell"] == "ring=2"
    assert not report["failed"]
    assert 0 < report["max_rel_error"] <= report["tolerance"] == 1e-4
    assert report["bytes_sent_per_rank"] == report["bytes_formula_per_rank"]
    assert len(report["bytes_sent_per_rank"]) == len(report["memory_per_rank"]) == 2
    assert min(*report["bytes_sent_per_rank"], *report["memory_per_rank"]) > 0
    assert min(report["seconds_per_step"], report["seconds_per_step_one_rank"]) > 0


def test_a_vae(runtime: Path) -> None:
    report = verify(runtime, "--vae", "wan21", "--size", "2x5x4", "--width", "8", "--ranks", "2")
    assert not report["failed"]
    assert 0 < report["max_abs_error"] <= 1e-4
    assert report["bytes_sent_per_rank"] == report["bytes_formula_per_rank"]
    assert min(report["bytes_sent_per_rank"]) > 0
    assert min(*report["memory_growth"], report["memory_growth_one_rank"]) > 0
    assert 0 < report["fastest"] <= report["seconds"]
    assert 0 < report["fastest_one_rank"] <= report["seconds_one_rank"]


@pytest.fixture(scope="module")
def runner() -> Iterator[Verifier]:
    with verifier(TWO_RANKS.devices) as started:
        yield started


@pytest.mark.parametrize("steps", [1, 8])
def test_step_loops_are_held_to_their_algorithm(
    runner: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    cells = LoopCells(runner.client, TWO_RANKS.devices, tmp_path)
    layout = ParallelLayout(pipe=2, patches=3, warmup=steps)
    loop = Loop(class_name="DiTTransformer2DModel", variant="fixed variance", layout=layout)
    right = cells.ask(loop)
    assert not right.failed, right
    assert min(right.bytes_sent_per_rank) > 0
    # A reference with another number of exact steps is a different algorithm.
    other = 8 if steps == 1 else 1
    monkeypatch.setattr("parallel_backend.verify.loops.run.wanted", _with_warmup(other))
    assert cells.ask(loop).failed


def _with_warmup(warmup: int) -> Callable[..., torch.Tensor]:
    def other(transformer: Any, message: Sample, tensors: Any, plan: DenoisingPlan) -> torch.Tensor:
        return wanted(transformer, message, tensors, replace(plan, layout=replace(plan.layout, warmup=warmup)))

    return other


def test_what_differs_fails(runner: Verifier, tmp_path: Path) -> None:
    cell = Cell(class_name="DiTTransformer2DModel", variant="fixed variance", layout=ParallelLayout(ulysses=2))
    question = Cells(tmp_path).question(cell)

    def off(branch: int) -> torch.Tensor:
        wanted = question.stock(branch).clone()
        wanted.view(-1)[-1] += 1e-3 * wanted.abs().max()
        return wanted

    right, wrong = runner.ask(question), runner.ask(replace(question, stock=off))
    sharded = replace(question, layout=ParallelLayout(ulysses=2, shard_weights=True))
    fewer = runner.ask(replace(sharded, parameters=question.parameters[1:]))
    wide = runner.ask(replace(question, layout=ParallelLayout(tensor=32)))
    assert not right.failed
    assert wrong.failed
    assert 5e-4 < wrong.max_rel_error < 2e-3
    assert fewer.failed  # it sends more bytes than the formulas predict
    assert fewer.max_rel_error <= fewer.tolerance
    assert wide.skipped is not None
    assert "needs 32 ranks and there are 2" in wide.skipped
