"""What was measured, for people."""

from collections.abc import Sequence

from .run import Row, Table


def describe(tables: Sequence[Table], rounds: int) -> str:
    """All tables, with what the numbers mean."""
    return "\n\n".join(
        [
            *map(_table, tables),
            f"float32, one thread a rank, ranks on cores of their own; {rounds} rounds, in each a step of every "
            "contestant after one that is not timed. A step is timed on the ranks, from their meeting to the whole "
            "prediction. Seconds are medians; speedup, and what it is against, are medians of the rounds' ratios; "
            "fastest is the ratio of the fastest steps, which other work on the machine disturbs least. On a CPU "
            "diffusers' ring is given our kernel's log-sum-exp, and xfuser is told that it may run.",
        ]
    )


def _table(table: Table) -> str:
    width = max(len(name) for name in [*table.left_out, *(row.name for row in table.rows)])
    against = f"against {table.best_peer}" if table.best_peer else ""
    head = f"{'':{width}}  seconds  speedup  fastest  rel. error  bytes sent a rank  {against}".rstrip()
    return "\n".join(
        [
            f"{table.case}; the machine's load was {table.load[0]:.1f} to {table.load[1]:.1f}",
            head,
            *(_row(row, width) for row in table.rows),
            *(f"{name:{width}}  left out: {why}" for name, why in table.left_out.items()),
        ]
    )


def _row(row: Row, width: int) -> str:
    sent = f"{max(row.sent_bytes):,}"
    against = "" if row.against_best is None else f"  {row.against_best:.2f}x"
    ratios = f"{row.speedup:6.2f}x  {row.fastest:6.2f}x"
    return f"{row.name:{width}}  {row.seconds:7.3f}  {ratios}  {row.max_rel_error:10.1e}  {sent:>17}{against}"
