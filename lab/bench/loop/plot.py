"""A chart of the seconds of a step loop over the speed of the link, one line per layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..step.plot import DPI, RULE, WIDTH
from .run import LoopTable

HEIGHT = 4.2
"""Inches of one chart."""


def draw(tables: Sequence[LoopTable], path: Path) -> None:
    """Draw one chart per case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT * len(tables)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for chart, table in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        _lines(chart, table)
    figure.savefig(path)


def _lines(chart: Any, table: LoopTable) -> None:
    """Draw a line per layout. The machine's own link has no known speed: it is placed at twice the fastest limit."""
    limits = sorted({row.megabits for row in table.rows if row.megabits})
    unlimited = 2 * limits[-1]
    for layout in dict.fromkeys(row.layout for row in table.rows):
        points = sorted((row.megabits or unlimited, table.steady(row)) for row in table.rows if row.layout == layout)
        chart.plot(*zip(*points, strict=True), marker="o", markersize=4, label=layout)
    chart.set_xscale("log")
    chart.set_xticks([*limits, unlimited], [*(f"{rate:g}" for rate in limits), "unlimited"])
    chart.minorticks_off()
    chart.set_ylim(bottom=0)
    chart.grid(axis="y", color=RULE)
    chart.set(xlabel="Mbit/s between the ranks", ylabel=f"seconds of {table.steps} steps")
    chart.set_title(str(table.case), loc="left", fontsize="medium")
    chart.spines[["top", "right"]].set_visible(False)
    chart.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
