"""``python -m parallel_backend verify``."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from ..errors import InvalidRequest
from ..layout import ParallelLayout
from . import matrix
from .examples import short_name, variants
from .matrix import Cell
from .run import Report, verifier


def run(options: argparse.Namespace) -> int:
    """Run the cells that the options name; the exit status."""
    cells = _cells(options)
    timed = len(cells) == 1
    reports: list[Report] = []
    with verifier(max(cell.layout.ranks for cell in cells)) as runner:
        for cell in cells:
            reports.append(runner.run(cell, time=timed))
            if not options.json:
                print(_line(reports[-1]), flush=True)
    if options.json:
        shown = [asdict(report) | {"failed": report.failed} for report in reports]
        print(msgspec.json.encode(shown[0] if timed else shown).decode())
    else:
        print(_summary(reports))
    return int(any(report.failed for report in reports))


def _cells(options: argparse.Namespace) -> list[Cell]:
    families = sorted({short_name(class_name) for class_name, _ in variants()})
    if options.family is not None and options.family not in families:
        raise InvalidRequest(f"family {options.family!r} is none of {', '.join(families)}")
    kinds = [pair for pair in variants() if options.family in (None, short_name(pair[0]))]
    names = [name for _, name in kinds]
    if options.variant is not None and options.variant not in names:
        raise InvalidRequest(f"variant {options.variant!r} is none of {', '.join(names)}")
    kinds = [pair for pair in kinds if options.variant in (None, pair[1])]
    if options.layout is None:
        chosen = matrix.ci() if options.ci else matrix.every()
        cells = [cell for cell in chosen if (cell.class_name, cell.variant) in kinds]
    else:
        layout = ParallelLayout.parse(options.layout)
        cells = [Cell(class_name=class_name, variant=name, layout=layout) for class_name, name in kinds]
    cells = [cell for cell in cells if options.ranks in (None, cell.layout.ranks)]
    if not cells:
        raise InvalidRequest(f"no layout has --ranks {options.ranks}")
    return [_shaped(cell, options) for cell in cells]


def _shaped(cell: Cell, options: argparse.Namespace) -> Cell:
    if options.size is not None:
        if not re.fullmatch(r"\d+(x\d+){1,2}", options.size):
            raise InvalidRequest(f"--size {options.size}: write TxHxW, or HxW for images, such as 3x30x52")
        cell = replace(cell, size=tuple(map(int, options.size.split("x"))))
    return cell if options.text_tokens is None else replace(cell, text=options.text_tokens)


def _line(report: Report) -> str:
    if report.skipped:
        return f"skipped  {report.cell}: {report.skipped}"
    said = f"{'FAILED' if report.failed else 'equal '}   {report.cell}: {report.max_rel_error:.1e}"
    if report.bytes_sent_per_rank != report.bytes_formula_per_rank:
        said += f"; sent {report.bytes_sent_per_rank}, the formulas say {report.bytes_formula_per_rank}"
    if report.seconds_per_step:
        said += f"; {report.seconds_per_step:.3f} s a step, one rank {report.seconds_per_step_one_rank:.3f} s"
    return said


def _summary(reports: Sequence[Report]) -> str:
    failed, skipped = sum(report.failed for report in reports), sum(bool(report.skipped) for report in reports)
    return f"{len(reports) - skipped} run, {failed} failed, {skipped} skipped"
