"""``python -m parallel_backend bench``."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from ..errors import InvalidRequest
from ..layout import ParallelLayout
from .cases import Case
from .report import describe
from .run import measure

LAYOUTS = ("ulysses=2", "ring=2", "cfg=2")
TOKENS = (4096, 1024)


def run(options: argparse.Namespace) -> int:
    """Measure what the options say; the exit status."""
    if options.plot:
        from .plot import check, draw

        check(Path(options.plot))
    layouts = [ParallelLayout.parse(text) for text in dict.fromkeys(options.layout or LAYOUTS)]
    cases = _cases(options, layouts)
    tables = measure(cases, layouts, rounds=options.rounds, peers=not options.no_peers, say=_say)
    if options.plot:
        draw(tables, Path(options.plot))
    if options.json:
        print(msgspec.json.encode([asdict(table) for table in tables]).decode())
    else:
        print(describe(tables, options.rounds))
    return 0


def _cases(options: argparse.Namespace, layouts: list[ParallelLayout]) -> list[Case]:
    """One case a size, and one with both branches of guidance where a layout splits them."""
    if options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least one is needed")
    return [
        Case(family=options.family, tokens=size, text_tokens=options.text_tokens, branches=branches)
        for size in dict.fromkeys(options.tokens or TOKENS)
        for branches in sorted({2 if layout.cfg > 1 else 1 for layout in layouts})
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
