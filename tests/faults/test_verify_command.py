"""``verify`` on a checkpoint and on the small models: what is right is said to be, and what is wrong is found."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from parallel_backend.layout import ParallelLayout
from parallel_backend.messages import Devices
from parallel_backend.verify.cells import Cells
from parallel_backend.verify.matrix import Cell
from parallel_backend.verify.run import verifier

from .backend import ROOT, environment


def test_a_checkpoint_under_one_layout(runtime: Path) -> None:
    command = [sys.executable, "-m", "parallel_backend", "verify", "shapes", "--layout", "ring=2", "--json"]
    variables = environment(runtime) | {"TMPDIR": str(runtime)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout)
    assert report["cell"] == "ring=2"
    assert not report["failed"]
    assert 0 < report["max_rel_error"] <= report["tolerance"] == 1e-4
    assert report["bytes_sent_per_rank"] == report["bytes_formula_per_rank"]
    assert len(report["bytes_sent_per_rank"]) == len(report["memory_per_rank"]) == 2
    assert min(*report["bytes_sent_per_rank"], *report["memory_per_rank"]) > 0
    assert min(report["seconds_per_step"], report["seconds_per_step_one_rank"]) > 0
    assert not [name for name in os.listdir(runtime) if name.startswith("verify-")]


def test_what_differs_fails(tmp_path: Path) -> None:
    cell = Cell(class_name="DiTTransformer2DModel", variant="fixed variance", layout=ParallelLayout(ulysses=2))
    question = Cells(tmp_path).question(cell)

    def off(branch: int) -> torch.Tensor:
        wanted = question.stock(branch).clone()
        wanted.view(-1)[-1] += 1e-3 * wanted.abs().max()
        return wanted

    with verifier(Devices(kind="cpu", indices=(0, 1))) as runner:
        right, wrong = runner.ask(question), runner.ask(replace(question, stock=off))
        sharded = replace(question, layout=ParallelLayout(ulysses=2, shard_weights=True))
        fewer = runner.ask(replace(sharded, parameters=question.parameters[1:]))
        wide = runner.ask(replace(question, layout=ParallelLayout(tensor=32)))
    assert not right.failed
    assert wrong.failed
    assert 5e-4 < wrong.max_rel_error < 2e-3
    assert fewer.failed  # it sends more than the formulas say
    assert fewer.max_rel_error <= fewer.tolerance
    assert wide.skipped is not None
    assert "needs 32 ranks and there are 2" in wide.skipped
