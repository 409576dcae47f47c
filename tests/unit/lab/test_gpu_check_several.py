"""The measurements of ``lab/gpu_check`` find what is wrong. What ranks do is in tests/ranks/test_gpu_check.py."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.bench.ranks.cases import Case
from lab.bench.step.run import Row, Table
from lab.gpu_check import attention, host_time, packages
from lab.gpu_check.several import overlap, peers, unlike
from lab.gpu_check.several.exchanges import layouts
from lab.gpu_check.several.ranks import all_cards
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices


@pytest.mark.parametrize(("ranks", "count"), [(2, 9), (3, 10), (4, 35), (8, 91)])
def test_layouts_are_all_that_use_every_rank_and_one_that_does_not(ranks, count):
    found = layouts(ranks)
    assert len(set(found)) == len(found) == count
    idle = [layout for layout in found if layout.ranks != ranks]
    assert idle == ([ParallelLayout(ulysses=ranks - 1)] if ranks > 2 else [])
    for text in ("data", "cfg", "pipe", "ring", "ulysses", "tensor"):
        assert ParallelLayout.parse(f"{text}={ranks}") in found
    for text in ("ring={} shard_weights", "ulysses={} shard_weights", "ring={} stale=previous"):
        assert ParallelLayout.parse(text.format(ranks)) in found


@pytest.mark.parametrize(("cards", "kind", "count"), [(0, "cpu", 4), (1, "cpu", 4), (3, "cuda", 3)])
def test_fewer_than_two_cards_are_replaced_by_cpu_ranks(monkeypatch, cards, kind, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    devices = all_cards(4)
    assert (devices.kind, len(devices.indices), devices.collectives) == (kind, count, "nccl")


@pytest.mark.parametrize(
    ("both", "hidden"), [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (4.0, -1.0)], ids=["none", "all", "half", "it disturbs"]
)
def test_what_is_hidden_is_what_both_together_take_less(both, hidden):
    seconds = {"both": [both] * 3, "compute": [2.0] * 3, "exchange": [1.0] * 3}
    found = overlap.figures(share=0.75, busy=0.5, seconds=seconds)
    assert found["hidden part of the exchange"] == pytest.approx(hidden)
    assert found["what could be hidden"] == 0.75
    assert overlap.figures(share=1.0, busy=0.25, seconds=seconds)["what could be hidden"] == 0.5


def row(name, error=1e-6, best=1.5):
    return Row(
        name=name, ours="=" in name, seconds=0.5, all_seconds=(0.5,), speedup=2.0, fastest=2.0, against_best=best,
        max_rel_error=error, sent_bytes=(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row("ulysses=2"), row("ring=2")], ""),
        ([row("ulysses=2"), row("ring=2", error=float("nan"))], "flux, 256 tokens, 128 text tokens: ring=2"),
        ([row("ulysses=2")], "flux, 256 tokens, 128 text tokens: ring=2"),
    ],
)
def test_a_layout_of_ours_that_is_wrong_or_missing_fails_the_comparison(monkeypatch, capsys, rows, wrong):
    def measure(cases, layouts, devices, *, rounds, peers, log, dtype):
        assert dtype == "float32"
        left_out = {"xfuser ulysses=2": "not installed: pip install xfuser"}
        yield Table(
            case=cases[0], rows=(row("one process"), *rows), left_out=left_out, best_peer="a peer", load=(0.0, 0.0)
        )

    monkeypatch.setattr(peers, "measure", measure)
    assert peers.main() == bool(wrong)
    found = json.loads(capsys.readouterr().out)
    assert found.get("WRONG", "") == wrong
    assert found["flux, 256 tokens, 128 text tokens: one process"]["x of the fastest peer"] == 1.5
    assert "pip install xfuser" in found["flux, 256 tokens, 128 text tokens: xfuser ulysses=2"]


@pytest.fixture
def loops(monkeypatch):
    """Step loops whose ranks are fakes."""
    made = unlike.Loops.__new__(unlike.Loops)
    made.ranks, made.devices, made.inputs = 2, Devices(kind="cpu", indices=(0, 1)), Path("inputs")
    return made


def test_an_error_of_an_exact_layout_is_named(loops, monkeypatch):
    results = {"one rank": torch.ones(3), "ring=2": torch.ones(3) * 1.0001, "tensor=2": torch.ones(3) * 1.1}
    monkeypatch.setattr(loops, "_samples", lambda ranks, layout: results[layout])
    found = loops._exact(None, ["ring={n}", "tensor={n}"])
    assert found["ring=2"].startswith("error 1.0e-04")
    assert found["tensor=2"].startswith("WRONG: error 1.0e-01")


def event(name, kind, seconds=0.0, **more):
    return SimpleNamespace(
        name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: 1e6 * seconds), **more
    )


def test_a_profile_is_counted_without_what_shows_twice():
    cpu, gpu = torch.device("cpu").type.upper(), "DeviceType.CUDA"
    events = [
        event("cudaLaunchKernel", f"DeviceType.{cpu}"), event("cudaLaunchKernelExC", f"DeviceType.{cpu}"),
        event("cudaMemcpyAsync", f"DeviceType.{cpu}"), event("cudaStreamSynchronize", f"DeviceType.{cpu}"),
        event("cudaDeviceSynchronize", f"DeviceType.{cpu}"), event("a kernel", gpu, 0.25),
        event("a copy", gpu, 0.5, is_user_annotation=False), event("a range", gpu, 8.0, is_user_annotation=True),
    ]  # fmt: skip
    assert host_time.counts(events) == {"ms on the GPU": 750.0, "kernels": 2.0, "synchronisations": 1.0}


def test_a_profile_of_this_machine_can_be_counted():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8) @ torch.ones(8)
    assert host_time.counts(profiler.events() or []) == dict.fromkeys(
        ("ms on the GPU", "kernels", "synchronisations"), 0.0
    )


def test_attention_is_timed_and_kernels_that_cannot_run_are_named(monkeypatch):
    refused: dict[str, None] = {}
    times = attention._times(2, 16, 64, torch.device("cpu"), refused)
    assert times.keys() == {"sdpa", "sdpa with lse"}
    assert all(isinstance(time, float) and time > 0 for time in times.values())
    assert [text.partition(":")[0] for text in refused] == ["flash", "cudnn", "sage"]

    def fails(*args):
        raise RuntimeError("no kernel")

    assert attention._milliseconds(fails, torch.device("cpu")) == "RuntimeError: no kernel"


FAULT = """
import sys
import torch, torch.distributed as dist
from lab.gpu_check import nccl
broadcast = dist.broadcast
def wrong(tensor, source):
    broadcast(tensor, source)
    tensor.add_(1)
if {fault}:
    dist.broadcast = wrong
sys.exit(nccl.main())
"""


@pytest.mark.parametrize("fault", [False, True])
def test_the_check_of_nccl_runs_over_gloo_and_finds_what_is_wrong(fault):
    result = subprocess.run(
        [sys.executable, "-c", FAULT.format(fault=fault)], cwd=packages.ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == fault, result.stderr
    found = json.loads(result.stdout)
    assert found["broadcast of uint8"] == ("wrong" if fault else "right")
    assert found["a number on the CPU"] == found["a new group"] == "right"
    assert found["float32 to itself"] == found["a group on a full card"] == "left out: needs a GPU"


def test_a_case_of_the_comparison_has_a_grid():
    for tokens in {*peers.TOKENS["cuda"], *peers.TOKENS["cpu"], *unlike.TOKENS.values()}:
        assert Case(family="flux", tokens=tokens, text_tokens=128, branches=1).grid[0] > 1
