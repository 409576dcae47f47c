"""The benchmark commands complete and leave nothing behind. No test asserts how fast anything is."""

import math
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.bench.cache import CachedLoop
from lab.bench.projections.command import WAYS, WaysTaken
from lab.bench.recovery import ROWS, Recovery
from lab.bench.resume import KeptState
from lab.bench.step.report import describe
from lab.bench.step.run import Table
from lab.bench.wire import WireMeasurement
from parallel_backend.supervisor.ranks.spares import MEMORY
from scripts import processes
from tests.support.bench_json import results

from .backend import run_command


def bench(runtime: Path, result: Any, *arguments: str) -> Any:
    """Run a command whose temporary files, and so its backend's runtime folder, are inside ``runtime``."""
    completed = run_command(runtime, *arguments, "--json", program="lab", timeout=500, TMPDIR=str(runtime))
    assert completed.returncode == 0, completed.stderr
    # The command and its backend have inherited TMPDIR.
    left = processes.find("TMPDIR", lambda value: value == str(runtime))
    assert not left, processes.describe(left)
    assert not list(runtime.glob("bench-*"))
    return results(completed.stdout, result)


def assert_positive(*values: float) -> None:
    assert all(math.isfinite(value) and value > 0 for value in values), values


@pytest.mark.long
def test_bench_wire(runtime: Path) -> None:
    (measured,) = bench(runtime, list[WireMeasurement], "bench", "wire", "--megabytes", "100")
    assert measured.reply_bytes == 100_000_000
    assert measured.supervisor_growth < 1 << 20
    assert measured.forward.keys() == measured.added.keys() == {"one rank", "ulysses=2"}
    assert_positive(measured.reply_ratio, measured.reply, measured.plain_copy)
    for spread in (measured.echo, measured.here, *measured.forward.values()):
        assert_positive(spread.best, spread.median, spread.worst)
    assert all(math.isfinite(spread.median) for spread in measured.added.values())
    assert f"{measured.reply_ratio:.2f} times a plain socket copy" in measured.describe()
    assert all(f"adds {spread}" in measured.describe() for spread in measured.added.values())


def test_bench_projections(runtime: Path) -> None:
    # Each rank compares each way with the layer on one rank.
    options = ("--tokens", "67", "--heads", "3", "--link", "0", "--rounds", "2")
    (measured,) = bench(runtime, list[WaysTaken], "bench", "projections", *options)
    assert measured.tokens == 67
    assert measured.seconds.keys() == measured.ratios.keys() == set(WAYS)
    assert_positive(*measured.seconds.values(), *measured.ratios.values())
    assert measured.ratios["exchange"] == 1
    assert all(f"{way} {1e3 * measured.seconds[way]:.1f} ms" in measured.describe() for way in WAYS)


@pytest.mark.long
def test_bench(runtime: Path) -> None:
    layouts = ("ulysses=2", "ring=2", "cfg=2")
    layout_options = [word for layout in layouts for word in ("--layout", layout)]
    sizes = ("--tokens", "64", "--tokens", "63", "--text-tokens", "8", "--rounds", "1")
    plot = runtime / "plot.png"
    tables = bench(runtime, list[Table], "bench", *sizes, *layout_options, "--plot", str(plot))
    assert [(table.case.tokens, table.case.branches) for table in tables] == [(64, 1), (64, 2), (63, 1), (63, 2)]
    for table in tables:
        rows = {row.name: row for row in table.rows}
        assert {"one process", "one process, two threads"} <= rows.keys()
        assert {row.name for row in table.rows if row.ours} == set(layouts[: 1 + table.case.branches])
        assert all(row.max_rel_error < 1e-4 for row in table.rows)
        for row in table.rows:
            assert_positive(row.seconds, row.speedup, *row.all_seconds)
            assert (max(row.sent_bytes) > 0) == ("=2" in row.name)
        for layout in layouts[:2] if table.case.tokens == 64 else ():
            assert max(rows[layout].sent_bytes) <= max(rows[f"diffusers {layout}"].sent_bytes)
        if table.case.tokens == 63:
            assert "divisible" in table.left_out["diffusers ulysses=2"]
        assert all(f"{row.speedup:.2f}x" in describe(table) for row in table.rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_bench_recovery(runtime: Path) -> None:
    completed = run_command(
        runtime, "bench", "recovery", "--rounds", "1", "--json", program="lab", timeout=500, TMPDIR=str(runtime)
    )
    assert completed.returncode in (0, 1), completed.stderr  # 1 if it is slow
    assert not processes.find("TMPDIR", lambda value: value == str(runtime))
    assert not list(runtime.glob("bench-*"))
    without, with_spares = results(completed.stdout, list[Recovery])
    assert (without.spares, with_spares.spares) == (0, 2)
    assert (without.spare_memory, completed.returncode) == (0, int(with_spares.failed))
    assert 100 << 20 < with_spares.spare_memory < MEMORY
    for recovery in (without, with_spares):
        assert {row: len(seconds) for row, seconds in recovery.seconds.items()} == dict.fromkeys(ROWS, 1) | {"warm": 2}
        assert_positive(*(second for seconds in recovery.seconds.values() for second in seconds))


@pytest.mark.long
def test_bench_cache(runtime: Path) -> None:
    arguments = ("--rounds", "1", "--steps", "16", "--layout", "", "--layout", "ulysses=2", "--json")
    completed = run_command(runtime, "bench", "cache", *arguments, program="lab", timeout=300, TMPDIR=str(runtime))
    rows = results(completed.stdout, list[CachedLoop])
    assert completed.returncode == int(any(row.failed for row in rows)), completed.stderr  # 1 if it is slow
    assert not processes.find("TMPDIR", lambda value: value == str(runtime))
    assert not list(runtime.glob("bench-*"))
    assert [(row.ranks, row.mode) for row in rows] == [
        (ranks, mode) for ranks in (1, 2) for mode in ("off", "safe", "fast")
    ]
    assert [row.saved for row in rows[:3]] == [1.0, 16 / 9, 16 / 6]
    assert_positive(*(row.seconds for row in rows))


@pytest.mark.long
def test_bench_resume(runtime: Path) -> None:
    completed = run_command(
        runtime, "bench", "resume", "--rounds", "1", "--json", program="lab", timeout=200, TMPDIR=str(runtime)
    )
    (kept,) = results(completed.stdout, list[KeptState])
    assert completed.returncode == int(kept.failed), completed.stderr  # 1 if it is slow
    assert not processes.find("TMPDIR", lambda value: value == str(runtime))
    assert not list(runtime.glob("bench-*"))
    assert kept.nbytes == 2 << 20, "a latent of 1 MiB, and the one prediction that the sampler remembers"
    assert_positive(kept.step)
    assert math.isfinite(kept.sending)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "wire", "--megabytes", "0"), "at least one is needed"),
        (("bench", "--tokens", "0"), "--tokens 0"),
        (("bench", "--tokens", "4093"), "1 x 4093"),
        (("bench", "--rounds", "0"), "--rounds 0"),
        (("bench", "cache", "--steps", "8"), "--steps 8: all of them are computed"),
        (("bench", "cache", "--rounds", "0"), "--rounds 0"),
        (("bench", "--layout", "sideways=2"), "'sideways=2'"),
        (("bench", "--family", "cake"), "flux, wan"),
        (("bench", "--devices", "0,1", "--layout", "ring=3"), 'layout "ring=3" needs 3 ranks'),
        (("bench", "--devices", "0", "--layout", "one rank"), "diffusers ulysses=2 needs 2 ranks"),
        (("bench", "--steps", "2", "--devices", "0", "--layout", "ring=2"), "needs 2 ranks"),
        (("bench", "--steps", "2", "--dtype", "bfloat16"), "in float32: leave --dtype out"),
        (("bench", "wire", "--devices", "cuda:0,cuda:1"), "there is no GPU here"),
        (("bench", "lora", "--devices", "0"), 'layout "ulysses=2" needs 2 ranks'),
        (("bench", "recovery", "--rounds", "0"), "--rounds 0: at least one is needed"),
        (("bench", "recovery", "--devices", "0"), 'layout "ulysses=2" needs 2 ranks'),
        (("bench", "resume", "--rounds", "0"), "--rounds 0: at least one is needed"),
        (("bench", "streaming", "--devices", "0"), 'layout "ulysses=2" needs 2 ranks'),
        (("bench", "memory", "--devices", "0"), 'layout "ulysses=2 shard_weights" needs 2 ranks'),
        (("bench", "--plot", "/no/such/folder/plot.png"), "/no/such/folder/plot.png"),
    ],
)
@pytest.mark.daily(5)
def test_sizes_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err
