"""Steps and step loops in several layouts: ``python -m lab bench``."""

import argparse
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from parallel_backend.client.devices import add_option, choose_devices, ranks_of
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout

from .loop import links
from .loop import plot as loop_plot
from .loop import report as loop_report
from .loop.run import LoopTable
from .loop.run import measure as measure_loops
from .ranks.cases import MODELS, Case
from .ranks.peers import chosen_peers
from .results import document
from .step import plot as step_plot
from .step import report as step_report
from .step.run import Table, measure

LAYOUTS = ("ulysses=2", "ring=2", "cfg=2")
LOOP_LAYOUTS = ("pipe=2", "ring=2 stale=previous", "ulysses=2", "ring=2")
TOKENS = (4096, 1024)
ROUNDS, LOOP_ROUNDS = 10, 3

AnyTable = TypeVar("AnyTable", Table, LoopTable)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    _add_model(parser)
    _add_timing(parser)
    add_option(parser)
    parser.add_argument("--json", action="store_true", help="print all results as one JSON document at the end")
    parser.add_argument(
        "--plot", metavar="FILE.png",
        help="draw the speedups, or with --link the seconds by link speed; needs matplotlib",
    )  # fmt: skip


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for shapes and layouts."""
    parser.add_argument(
        "--family", default="flux", help=f"shape of the model: {', '.join(MODELS)} (default %(default)s)"
    )
    parser.add_argument(
        "--layout", action="append", metavar="LAYOUT",
        help="a layout to time; repeatable (default ulysses=2, ring=2 and cfg=2; with --steps pipe=2, "
        '"ring=2 stale=previous", ulysses=2 and ring=2)',
    )  # fmt: skip
    parser.add_argument(
        "--tokens", action="append", type=int, metavar="N", help="latent tokens; repeatable (default 4096 and 1024)"
    )
    parser.add_argument(
        "--frames", type=int, default=0, metavar="N",
        help="latent frames of a video, which share the tokens (default: 1 of wan, 16 of latte and ltx2)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="without --steps: what all compute in (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--text-tokens", type=int, default=128, metavar="N", help="text tokens (default %(default)s)")


def _add_timing(parser: argparse.ArgumentParser) -> None:
    """Add the options for timing and peers."""
    parser.add_argument(
        "--rounds", type=int, metavar="N",
        help="timed steps of each contestant (default 10); with --steps, timed loops of each layout (default 3)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, metavar="N",
        help="time whole step loops of N steps instead of single steps, without peers; pipe and stale layouts only "
        "pay off over several steps",
    )  # fmt: skip
    parser.add_argument(
        "--link", action="append", type=float, default=[], metavar="MBIT",
        help="with --steps and layouts of two ranks: also time on a link limited to this many megabits a second; "
        "repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers", action="store_true",
        help="without --steps: leave out the parallelism of diffusers and of other projects",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for and return the exit status."""
    if options.plot:
        step_plot.check(Path(options.plot))
    if options.steps is not None:
        return _run_loops(options)
    if options.link:
        raise InvalidRequest("--link is for whole step loops: give --steps as well")
    layouts = [ParallelLayout.parse(text) for text in dict.fromkeys(options.layout or LAYOUTS)]
    rounds = ROUNDS if options.rounds is None else options.rounds
    cases = _cases(options, layouts)
    peers = chosen_peers(everyone=not options.no_peers and MODELS[options.family].peers)
    devices = choose_devices(options.devices, ranks_of(layouts) | {peer.name: peer.ranks for peer in peers})
    tables = measure(cases, layouts, devices, rounds=rounds, peers=peers, log=_log, dtype=options.dtype)
    return _show(
        tables, len(cases), options,
        describe=step_report.describe, legend=step_report.legend(rounds, devices, options.dtype), draw=step_plot.draw,
    )  # fmt: skip


def _check_loops(options: argparse.Namespace, layouts: Sequence[ParallelLayout]) -> None:
    if options.steps < 1:
        raise InvalidRequest(f"--steps {options.steps}: at least one is needed")
    if options.dtype != "float32":
        raise InvalidRequest("--steps times loops in float32: leave --dtype out")
    if any(layout.cfg > 1 for layout in layouts):
        raise InvalidRequest("--steps times loops of one prompt: leave layouts with cfg out")
    if options.link and (min(options.link) <= 0 or any(layout.ranks != links.RANKS for layout in layouts)):
        raise InvalidRequest(f"--link takes megabits above 0, and layouts of {links.RANKS} ranks")
    if options.plot and not options.link:
        raise InvalidRequest("--plot of step loops draws seconds by link speed: give --link as well")


def _run_loops(options: argparse.Namespace) -> int:
    layouts = [ParallelLayout.parse(text) for text in dict.fromkeys(options.layout or LOOP_LAYOUTS)]
    _check_loops(options, layouts)
    rounds = LOOP_ROUNDS if options.rounds is None else options.rounds
    cases = _cases(options, layouts)
    devices = choose_devices(options.devices, ranks_of(layouts))
    if options.link and devices.kind == "cuda" and devices.collectives == "nccl":
        raise InvalidRequest(
            "--link limits a network, which NCCL does not use between the GPUs of one machine: "
            "PARALLEL_DIT_COLLECTIVES=gloo, or CUDA_VISIBLE_DEVICES= for CPU ranks, would work"
        )
    tables = measure_loops(
        cases, layouts, devices, steps=options.steps, rounds=rounds, megabits=sorted(set(options.link)), log=_log
    )
    return _show(
        tables, len(cases), options,
        describe=loop_report.describe, legend=loop_report.legend(rounds, devices), draw=loop_plot.draw,
    )  # fmt: skip


def _show(
    tables: Generator[AnyTable, None, None], count: int, options: argparse.Namespace, *,
    describe: Callable[[AnyTable], str], legend: str, draw: Callable[[Sequence[AnyTable], Path], None],
) -> int:  # fmt: skip
    """Print and plot each table as soon as it is measured, so that an interrupted run keeps its finished tables.

    With ``--json``, print one document at the end instead.

    Args:
        tables: measures one table after another.
        count: number of tables to come.
        options: the command line.
        describe: formats a table.
        legend: explains the columns; printed at the end.
        draw: draws all tables so far into a file.
    """
    finished: list[AnyTable] = []
    with closing(tables):
        for table in tables:
            finished.append(table)
            if not options.json:
                print(describe(table), end="\n\n", flush=True)
            if options.plot:
                draw(finished, Path(options.plot))
            _log(f"{table.case}: finished, {len(finished)} of {count}")
    print(document(finished) if options.json else legend, flush=True)
    return 0


def _cases(options: argparse.Namespace, layouts: list[ParallelLayout]) -> list[Case]:
    """One case per size, and a second one with both guidance branches if a layout splits them."""
    if options.rounds is not None and options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least one is needed")
    return [
        Case(
            family=options.family,
            tokens=size,
            text_tokens=options.text_tokens,
            branches=branches,
            frames=options.frames,
        )
        for size in dict.fromkeys(options.tokens or TOKENS)
        for branches in sorted({2 if layout.cfg > 1 else 1 for layout in layouts})
    ]


def _log(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)
