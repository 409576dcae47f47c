"""``python -m parallel_backend bench``."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from .loop import links, plot, report
from .loop.run import measure as measure_loops
from .ranks.cases import Case
from .step.report import describe
from .step.run import measure

LAYOUTS = ("ulysses=2", "ring=2", "cfg=2")
LOOP_LAYOUTS = ("pipe=2", "ring=2 stale=previous", "ulysses=2", "ring=2")
TOKENS = (4096, 1024)
ROUNDS, LOOP_ROUNDS = 10, 3


def run(options: argparse.Namespace) -> int:
    """Measure what the options say; the exit status."""
    if options.plot:
        from .step.plot import check, draw

        check(Path(options.plot))
    if options.steps is not None:
        return _run_loops(options)
    if options.link:
        raise InvalidRequest("--link is for whole step loops: give --steps as well")
    layouts = [ParallelLayout.parse(text) for text in dict.fromkeys(options.layout or LAYOUTS)]
    rounds = ROUNDS if options.rounds is None else options.rounds
    cases = _cases(options, layouts)
    tables = measure(cases, layouts, rounds=rounds, peers=not options.no_peers, say=_say)
    if options.plot:
        draw(tables, Path(options.plot))
    if options.json:
        print(msgspec.json.encode([asdict(table) for table in tables]).decode())
    else:
        print(describe(tables, rounds))
    return 0


def _run_loops(options: argparse.Namespace) -> int:
    layouts = [ParallelLayout.parse(text) for text in dict.fromkeys(options.layout or LOOP_LAYOUTS)]
    if options.steps < 1:
        raise InvalidRequest(f"--steps {options.steps}: at least one is needed")
    if any(layout.cfg > 1 for layout in layouts):
        raise InvalidRequest("--steps times loops of one prompt: leave layouts with cfg out")
    if options.link and (min(options.link) <= 0 or any(layout.ranks != links.RANKS for layout in layouts)):
        raise InvalidRequest(f"--link takes megabits above 0, and layouts of {links.RANKS} ranks")
    if options.plot and not options.link:
        raise InvalidRequest("--plot of step loops draws seconds by link: give --link as well")
    rounds = LOOP_ROUNDS if options.rounds is None else options.rounds
    cases = _cases(options, layouts)
    measured = measure_loops(
        cases, layouts, steps=options.steps, rounds=rounds, megabits=sorted(set(options.link)), say=_say
    )
    shown = msgspec.json.encode([asdict(one) for one in measured]).decode()
    print(shown if options.json else report.describe(measured, rounds), flush=True)
    if options.plot:
        plot.draw(measured, Path(options.plot))
    return 0


def _cases(options: argparse.Namespace, layouts: list[ParallelLayout]) -> list[Case]:
    """One case a size, and one with both branches of guidance where a layout splits them."""
    if options.rounds is not None and options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least one is needed")
    return [
        Case(family=options.family, tokens=size, text_tokens=options.text_tokens, branches=branches)
        for size in dict.fromkeys(options.tokens or TOKENS)
        for branches in sorted({2 if layout.cfg > 1 else 1 for layout in layouts})
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
