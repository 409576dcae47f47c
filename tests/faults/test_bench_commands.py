"""The benchmarks' commands run to their end and leave nothing; how fast anything is, they alone say."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from parallel_backend.__main__ import main
from parallel_backend.bench_step import StepMeasurement
from parallel_backend.bench_wire import WireMeasurement

from .backend import ROOT, environment

Measurement = TypeVar("Measurement", WireMeasurement, StepMeasurement)


def bench(runtime: Path, result: type[Measurement], *arguments: str) -> Measurement:
    """Run a command whose temporary files, and so its backend's runtime folder, are inside ``runtime``."""
    command = [sys.executable, "-m", "parallel_backend", *arguments, "--json"]
    variables = environment(runtime) | {"TMPDIR": str(runtime)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert not left(runtime)
    assert not list(runtime.glob("bench-*"))
    return msgspec.json.decode(done.stdout, type=result)


def left(runtime: Path) -> list[list[str]]:
    """What still runs of a command and of its backend: both have inherited this ``TMPDIR``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(runtime) and process.pid != os.getpid():
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_positive(*values: float) -> None:
    assert all(math.isfinite(value) and value > 0 for value in values), values


def test_bench_wire(runtime: Path) -> None:
    measured = bench(runtime, WireMeasurement, "bench-wire", "--megabytes", "100")
    assert measured.reply_bytes == 100_000_000
    assert measured.supervisor_growth < 1 << 20
    assert measured.forward.keys() == measured.added.keys() == {"one rank", "ulysses=2"}
    assert_positive(measured.reply_ratio, measured.reply, measured.plain_copy)
    for spread in (measured.echo, measured.here, *measured.forward.values()):
        assert_positive(spread.best, spread.median, spread.worst)
    assert all(math.isfinite(spread.median) for spread in measured.added.values())
    assert f"{measured.reply_ratio:.2f} times a plain socket copy" in measured.describe()
    assert all(f"adds {spread}" in measured.describe() for spread in measured.added.values())


def test_bench_step(runtime: Path) -> None:
    sizes = ("--tokens", "64", "--layers", "1", "--rounds", "1")
    layouts = ("ulysses=2", "cfg=2")
    measured = bench(runtime, StepMeasurement, "bench-step", *sizes, "--layout", layouts[0], "--layout", layouts[1])
    assert (measured.tokens, measured.layers, measured.rounds) == (64, 1, 1)
    assert measured.seconds.keys() == measured.speedup.keys() == {"one rank", *layouts}
    assert_positive(*measured.speedup.values(), *measured.seconds.values())
    assert measured.largest_difference < 1e-4
    assert all(f"{speedup:.2f}x" in measured.describe() for speedup in measured.speedup.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench-wire", "--megabytes", "0"), "at least one is needed"),
        (("bench-step", "--tokens", "0"), "tokens=0"),
        (("bench-step", "--layout", "sideways=2"), "'sideways=2'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err
