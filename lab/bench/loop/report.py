"""Results of step loops as text: tables, and the link speed at which two layouts are equally fast."""

from collections.abc import Iterator
from itertools import pairwise

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices

from ..step.report import where
from .run import LoopRow, LoopTable


def describe(table: LoopTable) -> str:
    """Format the table of one case."""
    width = max(len(row.layout) for row in table.rows)
    title = f"{table.case}, {table.steps} steps"
    head = f"{'':{width}}        link  seconds  speedup  of its bound  difference  bytes per rank and step"
    return "\n".join([title, head, *(_row(row, table.steps, width) for row in table.rows), *crossings(table)])


def legend(rounds: int, devices: Devices) -> str:
    """Explain the columns."""
    return (
        f"float32, {where(devices)}; {rounds} rounds, each with one loop of every "
        "layout in shuffled order. The ranks time the loops. Seconds are medians; speedup is the median of the rounds' "
        "ratios to one rank. The bound is the speedup of a pipeline whose stages wait only while it fills, and whose "
        "transfers take no time. Difference is that of the samples to one rank's, relative to their largest value. "
        "Bytes are those that the busiest rank sends."
    )


def _row(row: LoopRow, steps: int, width: int) -> str:
    link = f"{row.megabits:g} Mbit/s" if row.megabits else "unlimited"
    share = f"{row.speedup / row.bound:.1%} of {row.bound:.2f}x" if row.bound else ""
    sent = f"{max(row.sent_bytes) // steps:,}"
    return (
        f"{row.layout:{width}}  {link:>10}  {row.seconds:7.2f}  {row.speedup:6.2f}x  {share:>12}  "
        f"{row.max_rel_difference:10.1e}  {sent:>17}"
    )


def crossings(table: LoopTable) -> Iterator[str]:
    """Yield the link speed at which each pipeline and each exact layout are equally fast, measured and predicted."""
    unlimited = {row.layout: row for row in table.rows if row.megabits is None}
    for pipe in (row for row in unlimited.values() if row.bound):
        for other in unlimited.values():
            if ParallelLayout.parse(other.layout).adapts or not max(other.sent_bytes):
                continue
            measured, expected = crossing(table, pipe, other), predicted(table, pipe, other)
            if measured and expected:
                yield (
                    f"{pipe.layout} and {other.layout} are equally fast at {measured:.0f} Mbit/s; the bytes sent "
                    f"predict {expected:.0f} ({measured / expected - 1:+.0%})"
                )


def predicted(table: LoopTable, pipe: LoopRow, other: LoopRow) -> float | None:
    """Predict from the bytes sent the link speed at which a pipeline and another layout are equally fast.

    There, the other layout's shorter computation makes up for its longer wait for bytes. The other layout waits for all
    bytes that do not travel while it computes. The pipeline waits for the bytes of its warm-up on the whole latent,
    during which one stage works at a time. The bytes of single patches travel while other patches are computed.

    Args:
        table: the table of both rows.
        pipe: the pipeline, on the machine's own link.
        other: the other layout, on the machine's own link.

    Returns:
        Megabits a second; None if one of the two is faster at any speed.
    """
    awaited = sum(pipe.sent_bytes) * min(ParallelLayout.parse(pipe.layout).warmup, table.steps) / table.steps
    extra_bytes = max(other.sent_bytes) - awaited
    seconds_saved = table.steady(pipe) - table.steady(other) + other.hidden
    return 8e-6 * extra_bytes / seconds_saved if seconds_saved > 0 and extra_bytes > 0 else None


def crossing(table: LoopTable, pipe: LoopRow, other: LoopRow) -> float | None:
    """Return the link speed, in megabits a second, at which a pipeline's curve crosses another layout's, or None.

    Seconds are interpolated linearly in the inverse of the speed between two measured speeds.
    """
    pipe_seconds, other_seconds = (
        {row.megabits: table.steady(row) for row in table.rows if row.layout == layout and row.megabits}
        for layout in (pipe.layout, other.layout)
    )
    gaps = [(1 / rate, other_seconds[rate] - pipe_seconds[rate]) for rate in sorted(pipe_seconds)]
    for (x, gap), (next_x, next_gap) in pairwise(gaps):
        if gap > 0 >= next_gap:
            return 1 / (x + (next_x - x) * gap / (gap - next_gap))
    return None
