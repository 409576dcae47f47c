"""What comes of a comparison, and how it is printed."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import msgspec

TOLERANCE = 1e-4
"""Largest relative error in float32 at which a layout counts as equal to one process."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a comparison.

    Attributes:
        cell: what was compared.
        skipped: why the layout is impossible; None if it was compared.
        tolerance: largest relative error that counts as equal.
        max_abs_error: largest over all branches.
        max_rel_error: largest over all branches, relative to the largest value of the branch's prediction.
        bytes_sent_per_rank: as counted.
        bytes_formula_per_rank: as the strategies' formulas predict.
        memory_per_rank: bytes on the device; on the CPU, bytes of the process.
        seconds_per_step: None unless measured.
        seconds_per_step_one_rank: None unless measured.
    """

    cell: str
    skipped: str | None = None
    tolerance: float = TOLERANCE
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    bytes_sent_per_rank: tuple[int, ...] = ()
    bytes_formula_per_rank: tuple[int, ...] = ()
    memory_per_rank: tuple[int, ...] = ()
    seconds_per_step: float | None = None
    seconds_per_step_one_rank: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the result differs from one process's, or the bytes sent differ from the formulas."""
        if self.skipped:
            return False
        return not self.max_rel_error <= self.tolerance or self.bytes_sent_per_rank != self.bytes_formula_per_rank


def show(incoming: Iterable[Report], *, as_json: bool, single: bool) -> int:
    """Print each report when it arrives, or all as JSON at the end, and return the exit status.

    With ``single``, the JSON of one report is an object instead of a list.
    """
    reports: list[Report] = []
    for report in incoming:
        reports.append(report)
        if not as_json:
            print(_line(report), flush=True)
    if as_json:
        objects = [asdict(report) | {"failed": report.failed} for report in reports]
        print(msgspec.json.encode(objects[0] if single and len(objects) == 1 else objects).decode())
    else:
        print(_summary(reports))
    return int(any(report.failed for report in reports))


def _line(report: Report) -> str:
    if report.skipped:
        return f"skipped  {report.cell}: {report.skipped}"
    line = f"{'FAILED' if report.failed else 'equal '}   {report.cell}: {report.max_rel_error:.1e}"
    if report.bytes_sent_per_rank != report.bytes_formula_per_rank:
        line += f"; sent {report.bytes_sent_per_rank} bytes, the formulas say {report.bytes_formula_per_rank}"
    if report.seconds_per_step is not None:
        line += f"; {report.seconds_per_step:.3f} s per step"
    if report.seconds_per_step_one_rank is not None:
        line += f", one rank {report.seconds_per_step_one_rank:.3f} s"
    return line


def _summary(reports: Sequence[Report]) -> str:
    failed, skipped = sum(report.failed for report in reports), sum(bool(report.skipped) for report in reports)
    return f"{len(reports) - skipped} run, {failed} failed, {skipped} skipped"
