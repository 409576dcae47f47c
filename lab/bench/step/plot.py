"""A bar chart of the speedups."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_backend.errors import InvalidRequest

from .run import Table

WIDTH, BAR, HEADROOM, DPI = 9.0, 0.28, 0.8, 100
"""Inches of the picture's width, of a bar, and of a chart beside its bars; dots per inch."""
OURS, THEIRS, RULE = "#2563a8", "#9aa5b1", "#d8dde3"


def check(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        InvalidRequest: the name does not end in .png, its folder does not exist, or matplotlib is not installed.
    """
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--plot {path}: name a .png file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib: pip install matplotlib")


def draw(tables: Sequence[Table], path: Path) -> None:
    """Draw one chart per case: how many times as fast as one process each contestant is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [len(table.rows) for table in tables]
    height = BAR * sum(bars) + HEADROOM * len(tables)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    charts = figure.subplots(len(tables), squeeze=False, sharex=True, height_ratios=bars)[:, 0]
    for chart, table in zip(charts, tables, strict=True):
        _bars(chart, table)
    figure.savefig(path)


def _bars(chart: Any, table: Table) -> None:
    chart.axvline(1.0, color=RULE, zorder=0)
    bars = chart.barh(
        [row.name for row in table.rows],
        [row.speedup for row in table.rows],
        color=[OURS if row.ours else THEIRS for row in table.rows],
    )
    chart.bar_label(bars, fmt="%.2fx", padding=4)
    chart.invert_yaxis()  # the first contestant at the top
    chart.margins(x=0.12)
    chart.set_title(f"{table.case}: speedup over one process", loc="left", fontsize="medium")
    chart.spines[["top", "right", "left"]].set_visible(False)
    chart.tick_params(left=False)
