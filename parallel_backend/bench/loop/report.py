"""Step loops for people: tables, and where the curves of two layouts over the link's speed cross."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...layout.parallel_layout import ParallelLayout
from .run import LoopRow, Loops


def describe(measured: Sequence[Loops], rounds: int) -> str:
    """All tables, with what the numbers mean."""
    return "\n\n".join(
        [
            *map(_table, measured),
            f"float32, one thread a rank, ranks on cores of their own; {rounds} rounds, in each a loop of every layout "
            "in another order. Loops are timed on the ranks. Seconds are medians; speedup is the median of the rounds' "
            "ratios to one rank; bound is that of a pipeline whose stages wait but to fill up, and send for nothing. "
            "The difference is that of the samples to one rank's.",
        ]
    )


def _table(loops: Loops) -> str:
    width = max(len(row.layout) for row in loops.rows)
    lines = [f"{loops.case}, {loops.steps} steps"]
    head = f"{'':{width}}      link  seconds  speedup  of its bound  difference  bytes sent a rank and step"
    lines += [head, *(_row(row, loops.steps, width) for row in loops.rows)]
    return "\n".join([*lines, *crossings(loops)])


def _row(row: LoopRow, steps: int, width: int) -> str:
    link = f"{row.megabits:g} Mbit/s" if row.megabits else "its own"
    share = f"{row.speedup / row.bound:.1%} of {row.bound:.2f}x" if row.bound else ""
    sent = f"{max(row.sent_bytes) // steps:,}"
    return (
        f"{row.layout:{width}}  {link:>8}  {row.seconds:7.2f}  {row.speedup:6.2f}x  {share:>12}  "
        f"{row.max_rel_difference:10.1e}  {sent:>17}"
    )


def crossings(loops: Loops) -> Iterator[str]:
    """Where a pipeline stops to be faster than each exact layout, as measured and by the bytes."""
    own = {row.layout: row for row in loops.rows if row.megabits is None}
    for pipe in (row for row in own.values() if row.bound):
        for other in own.values():
            if ParallelLayout.parse(other.layout).adapts or not max(other.sent_bytes):
                continue
            found, wanted = crossing(loops, pipe, other), predicted(loops, pipe, other)
            if found and wanted:
                yield (
                    f"{pipe.layout} and {other.layout} are equally fast at {found:.0f} Mbit/s; by the bytes at "
                    f"{wanted:.0f} ({found / wanted - 1:+.0%})"
                )


def predicted(loops: Loops, pipe: LoopRow, other: LoopRow) -> float | None:
    """Megabits a second at which what the other layout computes faster is what it waits longer for bytes.

    It waits for all of its own but what travels while it computes. The pipeline waits for those of its warm-up on the
    whole latent, in which one stage works at a time; those of patches travel while others are computed.
    """
    waits = sum(pipe.sent_bytes) * min(ParallelLayout.parse(pipe.layout).warmup, loops.steps) / loops.steps
    more = max(other.sent_bytes) - waits
    slower = loops.steady(pipe) - loops.steady(other) + other.hidden
    return 8e-6 * more / slower if slower > 0 and more > 0 else None


def crossing(loops: Loops, pipe: LoopRow, other: LoopRow) -> float | None:
    """Megabits a second at which the measured curves cross, between two that were measured, in a straight line over
    the seconds by the link's inverse."""
    by_rate = {
        layout: {row.megabits: loops.steady(row) for row in loops.rows if row.layout == layout and row.megabits}
        for layout in (pipe.layout, other.layout)
    }
    rates = sorted(rate for rate in by_rate[pipe.layout] if rate)
    gaps = [(1 / rate, by_rate[other.layout][rate] - by_rate[pipe.layout][rate]) for rate in rates]
    for (x, gap), (next_x, next_gap) in pairwise(gaps):
        if gap > 0 >= next_gap:
            return 1 / (x + (next_x - x) * gap / (gap - next_gap))
    return None
