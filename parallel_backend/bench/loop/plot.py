"""Seconds of a step loop over the link's speed, a line a layout, drawn with Pillow."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..step.plot import INK, MARGIN, PAPER, RULE, WIDTH
from .run import LoopRow, Loops

HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LINE = 420, 70, 200, 40, 50, 16
COLOURS = ("#2563a8", "#c2571a", "#2f855a", "#7c3aed", "#b7791f", "#9aa5b1")


def draw(measured: Sequence[Loops], path: Path) -> None:
    """One chart a case; the link's own speed is drawn as twice the fastest that was asked for."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, HEIGHT * len(measured)), PAPER)
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=14)
    for i, loops in enumerate(measured):
        _chart(canvas, font, loops, i * HEIGHT)
    image.save(path)


def _chart(canvas: Any, font: Any, loops: Loops, top: int) -> None:
    rates = sorted({row.megabits for row in loops.rows if row.megabits})
    own, most = 2 * rates[-1], max(map(loops.steady, loops.rows))

    def place(row: LoopRow) -> tuple[float, float]:
        across = math.log((row.megabits or own) / rates[0]) / math.log(own / rates[0])
        height = HEIGHT - TOP - BOTTOM
        return LEFT + across * (WIDTH - LEFT - RIGHT), top + TOP + height * (1 - loops.steady(row) / most)

    canvas.text((MARGIN, top + 10), f"{loops.case}: seconds of {loops.steps} steps, by Mbit/s", fill=INK, font=font)
    floor = top + HEIGHT - BOTTOM
    for share in (0.0, 0.5, 1.0):
        y = floor - share * (HEIGHT - TOP - BOTTOM)
        canvas.line((LEFT, y, WIDTH - RIGHT, y), fill=RULE)
        canvas.text((MARGIN, y - 8), f"{share * most:.1f}", fill=INK, font=font)
    ends = []
    for layout, colour in zip(dict.fromkeys(row.layout for row in loops.rows), COLOURS * 9, strict=False):
        points = [place(row) for row in sorted(loops.rows, key=lambda r: r.megabits or own) if row.layout == layout]
        canvas.line(points, fill=colour, width=2)
        ends.append((points[-1][1], layout, colour))
    below = -math.inf
    for y, layout, colour in sorted(ends):
        below = max(y, below + LINE)
        canvas.text((WIDTH - RIGHT + 8, below - 8), layout, fill=colour, font=font)
    for rate in [*rates, own]:
        x = place(next(row for row in loops.rows if (row.megabits or own) == rate))[0]
        canvas.text((x - 14, floor + 8), "own" if rate == own else f"{rate:g}", fill=INK, font=font)
