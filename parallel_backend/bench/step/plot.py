"""A bar chart of the ratios, drawn with Pillow."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest
from .run import Table

WIDTH, LINE, LEFT, RIGHT, MARGIN = 900, 24, 260, 80, 16
OURS, THEIRS, INK, PAPER, RULE = "#2563a8", "#9aa5b1", "#1f2933", "white", "#d8dde3"


def check(path: Path) -> None:
    """Refuse what could not be written, before anything is measured.

    Raises:
        InvalidRequest: no PNG, no such folder, or no Pillow.
    """
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--plot {path}: name a .png file in a folder that exists")
    if importlib.util.find_spec("PIL") is None:
        raise InvalidRequest("--plot needs Pillow: pip install Pillow")


def draw(tables: Sequence[Table], path: Path) -> None:
    """One group of bars a case: how many times as fast as one process each contestant is."""
    from PIL import Image, ImageDraw, ImageFont

    lines = sum(len(table.rows) + 2 for table in tables)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + LINE * lines), PAPER)
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=14)
    longest = max(row.speedup for table in tables for row in table.rows)
    unit = (WIDTH - LEFT - RIGHT) / max(longest, 1.0)
    top = MARGIN
    for table in tables:
        top = _group(canvas, font, table, top, unit)
    image.save(path)


def _group(canvas: Any, font: Any, table: Table, top: int, unit: float) -> int:
    """Draw a case from ``top`` on; where the next one begins."""
    canvas.text((MARGIN, top), f"{table.case}: times as fast as one process", fill=INK, font=font)
    first = top = top + LINE
    for row in table.rows:
        end = LEFT + row.speedup * unit
        canvas.text((MARGIN, top), row.name, fill=INK, font=font)
        canvas.rectangle((LEFT, top + 3, end, top + LINE - 4), fill=OURS if row.ours else THEIRS)
        canvas.text((end + 6, top), f"{row.speedup:.2f}x", fill=INK, font=font)
        top += LINE
    one = LEFT + unit
    canvas.line((one, first, one, top), fill=RULE, width=1)
    return top + LINE
