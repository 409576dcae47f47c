"""``verify`` on a checkpoint and on the small models passes correct results and finds wrong ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lab.verify.forward.cells import SmallModels
from lab.verify.forward.matrix import Cell
from lab.verify.loops.run import Loop, LoopVerifier, reference_samples
from parallel_backend.denoiser.plan import DenoisingPlan
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.verify.run import Verifier, verifier

from .backend import TWO_RANKS, run_command


def verify(runtime: Path, *arguments: str, program: str = "parallel_backend") -> dict[str, Any]:
    """The report of a ``verify`` command, which must leave no temporary folder behind."""
    completed = run_command(runtime, "verify", *arguments, "--json", program=program, timeout=300, TMPDIR=str(runtime))
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


@pytest.mark.long
def test_a_vae(runtime: Path) -> None:
    report = verify(runtime, "--vae", "wan21", "--size", "2x5x4", "--width", "8", "--ranks", "2", program="lab")
    assert not report["failed"]
    assert 0 < report["max_abs_error"] <= 1e-4
    assert report["bytes_sent_per_rank"] == report["bytes_formula_per_rank"]
    assert min(report["bytes_sent_per_rank"]) > 0
    assert min(*report["memory_growth"], report["memory_growth_one_rank"]) > 0
    assert 0 < report["fastest"] <= report["seconds"]
    assert 0 < report["fastest_one_rank"] <= report["seconds_one_rank"]


@pytest.fixture(scope="module")
def runner() -> Iterator[Verifier]:
    with verifier(TWO_RANKS.devices) as running:
        yield running


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.daily(1)
def test_step_loops_equal_their_algorithm(
    runner: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    loops = LoopVerifier(runner.client, TWO_RANKS.devices, tmp_path)
    layout = ParallelLayout(pipe=2, patches=3, warmup=steps)
    loop = Loop(class_name="DiTTransformer2DModel", variant="fixed variance", layout=layout)
    report = loops.compare(loop)
    assert not report.failed, report
    assert min(report.bytes_sent_per_rank) > 0
    # With another number of exact steps the algorithm is a different one.
    other = 8 if steps == 1 else 1
    monkeypatch.setattr("lab.verify.loops.run.reference_samples", _with_warmup(other))
    assert loops.compare(loop).failed


def _with_warmup(warmup: int) -> Callable[..., torch.Tensor]:
    def other(transformer: Any, message: Sample, tensors: Any, plan: DenoisingPlan) -> torch.Tensor:
        return reference_samples(
            transformer, message, tensors, replace(plan, layout=replace(plan.layout, warmup=warmup))
        )

    return other


def test_what_differs_fails(runner: Verifier, tmp_path: Path) -> None:
    cell = Cell(class_name="DiTTransformer2DModel", variant="fixed variance", layout=ParallelLayout(ulysses=2))
    comparison = SmallModels(tmp_path, torch.device("cpu")).comparison(cell)

    def off(branch: int) -> torch.Tensor:
        prediction = comparison.stock(branch).clone()
        prediction.view(-1)[-1] += 1e-3 * prediction.abs().max()
        return prediction

    correct, wrong = runner.compare(comparison), runner.compare(replace(comparison, stock=off))
    sharded = replace(comparison, layout=ParallelLayout(ulysses=2, shard_weights=True))
    fewer_weights = runner.compare(replace(sharded, parameters=comparison.parameters[1:]))
    impossible = runner.compare(replace(comparison, layout=ParallelLayout(tensor=32)))
    assert not correct.failed
    assert wrong.failed
    assert 5e-4 < wrong.max_rel_error < 2e-3
    assert fewer_weights.failed  # it sends more bytes than the formulas predict
    assert fewer_weights.max_rel_error <= fewer_weights.tolerance
    assert impossible.skipped is not None
    assert "needs 32 ranks and there are 2" in impossible.skipped
