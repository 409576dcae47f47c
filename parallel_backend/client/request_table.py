"""The last lines of the log of requests as a table."""

from collections.abc import Sequence

from ..protocol.request_log import RequestLine

_HEAD = ("time", "request", "model", "layout", "size", "steps", "seconds", "of that", "MB in", "MB out", "outcome")
_TOTAL = ("queued", "starting", "running")
"""The phases that follow each other; the others are parts of ``running``."""


def format_table(lines: Sequence[RequestLine]) -> str:
    """Return a table with a row for each line."""
    rows = [_HEAD, *map(_row, lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(line: RequestLine) -> tuple[str, ...]:
    phases = sorted(line.seconds.items(), key=lambda item: -item[1])
    parts = [f"{phase} {seconds:.1f}" for phase, seconds in phases if phase != "running" and seconds >= 0.05]
    return (
        line.time[:19].replace("T", " "),
        line.kind,
        line.model,
        line.layout or "-",
        "x".join(map(str, line.size)) or "-",
        str(line.steps or "-"),
        f"{sum(line.seconds.get(phase, 0.0) for phase in _TOTAL):.2f}",
        ", ".join(parts) or "-",
        f"{line.received / 1e6:.1f}",
        f"{line.sent / 1e6:.1f}",
        line.outcome,
    )
