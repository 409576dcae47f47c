"""Results of single steps as text."""

from parallel_backend.protocol.model_spec import Devices

from .run import Row, Table


def describe(table: Table) -> str:
    """Format the table of one case."""
    width = max(len(name) for name in [*table.left_out, *(row.name for row in table.rows)])
    against = f"against {table.best_peer}" if table.best_peer else ""
    head = f"{'':{width}}  seconds  speedup  fastest  rel. error  bytes per rank  {against}".rstrip()
    return "\n".join(
        [
            f"{table.case}; load average {table.load[0]:.1f} before, {table.load[1]:.1f} after",
            head,
            *(_row(row, width) for row in table.rows),
            *(f"{name:{width}}  left out: {why}" for name, why in table.left_out.items()),
        ]
    )


def legend(rounds: int, devices: Devices, dtype: str) -> str:
    """Explain the columns."""
    return (
        f"{dtype}, {where(devices)}; {rounds} rounds. In each round every contestant "
        "runs one untimed step and then a timed one. The ranks time a step from a barrier to the complete prediction. "
        "Seconds are medians. Speedup over one process, and over the fastest peer, is the median of the rounds' "
        "ratios; fastest is the ratio of the fastest steps, which other work on the machine disturbs least. Bytes per "
        "rank are those that the busiest rank sends. diffusers' ring attention uses our kernel's log-sum-exp, and on a "
        "CPU xfuser's checks for a GPU are bypassed."
    )


def where(devices: Devices) -> str:
    """The device of a rank, in words."""
    return "one thread per rank, each rank on its own cores" if devices.kind == "cpu" else f"at most {devices}"


def _row(row: Row, width: int) -> str:
    sent = f"{max(row.sent_bytes):,}"
    against = "" if row.against_best is None else f"  {row.against_best:.2f}x"
    ratios = f"{row.speedup:6.2f}x  {row.fastest:6.2f}x"
    return f"{row.name:{width}}  {row.seconds:7.3f}  {ratios}  {row.max_rel_error:10.1e}  {sent:>14}{against}"
