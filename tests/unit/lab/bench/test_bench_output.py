"""``bench`` prints each table as soon as it is measured, and draws charts."""

import contextlib
import io
import sys
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.bench.loop import run as loop_run
from lab.bench.loop.run import LoopRow, LoopTable
from lab.bench.ranks.cases import Case
from lab.bench.step import run as step_run
from lab.bench.step.run import Row, Table
from parallel_backend.errors import RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from tests.support.bench_json import results

SIZES = ("--tokens", "64", "--tokens", "63", "--rounds", "1")
STEPS = ("bench", "--layout", "ulysses=2", *SIZES)
LOOPS = ("bench", "--steps", "2", "--layout", "ulysses=2", *SIZES)


def step_table(case: Case) -> Table:
    rows = tuple(
        Row(
            name=name, ours=name == "ulysses=2", seconds=1.0, all_seconds=(1.0,), speedup=speedup, fastest=1.0,
            against_best=None, max_rel_error=0.0, sent_bytes=(0, 0),
        )
        for name, speedup in (("one process", 1.0), ("ulysses=2", 1.5))
    )  # fmt: skip
    return Table(case=case, rows=rows, left_out={"a peer": "not installed"}, best_peer=None, load=(0.0, 0.0))


def loop_rows(megabits: float | None, *layouts: ParallelLayout) -> list[LoopRow]:
    return [
        LoopRow(
            layout=str(layout), megabits=megabits, seconds=1.0, all_seconds=(1.0,), speedup=1.5, bound=None, hidden=0.0,
            max_rel_difference=0.0, sent_bytes=(0, 0),
        )
        for layout in layouts
    ]  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the functions that measure, and those that start processes; lists the sizes in the order measured.

    The first size yields a table. The second one interrupts the run, as Ctrl-C does.
    """
    sizes: list[int] = []

    def measure(case: Case) -> None:
        sizes.append(case.tokens)
        if len(sizes) == 2:
            raise KeyboardInterrupt

    def measure_steps(case: Case, *_: object) -> Table:
        measure(case)
        return step_table(case)

    def measure_loops(megabits: float | None, team: object, links: object, case: Case, *_: object) -> list[LoopRow]:
        measure(case)
        return loop_rows(megabits, ParallelLayout(), ParallelLayout(ulysses=2))

    monkeypatch.setattr(step_run, "write_model", lambda *_: Path())
    monkeypatch.setattr(step_run, "contestants", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(step_run, "_table", measure_steps)
    monkeypatch.setattr(loop_run, "write_model", lambda *_: Path())
    monkeypatch.setattr(loop_run, "_at", measure_loops)
    return sizes


@pytest.mark.parametrize("arguments", [STEPS, LOOPS])
def test_an_interrupted_run_keeps_the_first_table(capsys, measured, arguments):
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    output = capsys.readouterr().out
    assert measured == [64, 63]
    assert "flux, 64 tokens" in output
    assert "1.50x" in output
    assert "63 tokens" not in output


def test_a_table_reaches_stdout_before_the_next_size_is_measured(monkeypatch, measured):
    flushed: list[str] = []

    class Stdout(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Stdout())
    with pytest.raises(KeyboardInterrupt):
        main(STEPS)
    assert "flux, 64 tokens" in flushed[-1]


@pytest.mark.parametrize(("arguments", "result_type"), [(STEPS, list[Table]), (LOOPS, list[LoopTable])])
def test_json_is_one_document_at_the_end_and_progress_is_on_stderr(capsys, measured, arguments, result_type):
    measured.extend([0, 0])  # so that the second size does not interrupt the run
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    tables = results(captured.out, result_type)
    assert [table.case.tokens for table in tables] == [64, 63]
    assert "flux, 64 tokens, 128 text tokens: finished, 1 of 2" in captured.err
    assert "flux, 63 tokens, 128 text tokens: finished, 2 of 2" in captured.err


def test_an_interrupted_run_with_json_prints_no_half_document(capsys, measured):
    with pytest.raises(KeyboardInterrupt):
        main([*STEPS, "--json"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "finished, 1 of 2" in captured.err


def test_the_chart_of_an_interrupted_run_has_the_first_table(measured, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        main([*STEPS, "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_processes_end_when_a_table_cannot_be_drawn(monkeypatch, measured, tmp_path):
    ended = []

    @contextlib.contextmanager
    def contestants(*_: object):
        try:
            yield []
        finally:
            ended.append(True)

    def draw(*_: object) -> None:
        raise RankFailed("no chart")

    monkeypatch.setattr(step_run, "contestants", contestants)
    monkeypatch.setattr("lab.bench.step.plot.draw", draw)
    assert main([*STEPS, "--plot", str(tmp_path / "plot.png")]) == 1
    assert ended == [True]


def test_the_chart_of_loops(tmp_path):
    from lab.bench.loop import plot

    layouts = (ParallelLayout(), ParallelLayout(ulysses=2), ParallelLayout(pipe=2))
    rows = [row for megabits in (None, 100.0, 1000.0) for row in loop_rows(megabits, *layouts)]
    case = Case(family="flux", tokens=64, text_tokens=8, branches=1)
    table = LoopTable(case=case, steps=2, rows=tuple(rows))
    plot.draw([table, table], tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
