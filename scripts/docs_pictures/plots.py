"""The numbers of the pages, drawn."""

import math
import re
from collections.abc import Sequence

from scripts.docs_pictures import tables
from scripts.docs_pictures.svg import INK, PALE, RANKS, box, dot, legend, line, picture, text

WIDTH, LEFT, TOP, ROW = 640, 200, 50, 30


def bars(title: str, names: Sequence[str], groups: Sequence[Sequence[float]], kinds: Sequence[str], most: float) -> str:
    """Return a chart of horizontal bars, some for each name, with a line at each whole number."""
    parts, scale = [text(20, 28, title, size=15)], (WIDTH - LEFT - 70) / most
    bottom = TOP + len(names) * ROW * len(kinds)
    for tick in range(math.floor(most) + 1):
        x = LEFT + tick * scale
        parts += [
            line([(x, TOP - 4), (x, bottom)], PALE, width=1),
            text(x, bottom + 16, f"{tick}x", size=11, anchor="middle"),
        ]
    y = float(TOP)
    for name, values in zip(names, groups, strict=True):
        parts.append(text(LEFT - 12, y + ROW * len(kinds) / 2 + 1, name, anchor="end"))
        for value, colour in zip(values, RANKS, strict=False):
            parts += [
                box(LEFT, y + 3, value * scale, ROW - 9, colour),
                text(LEFT + value * scale + 6, y + 18, f"{value:.2f}x", size=12),
            ]
            y += ROW
    footer = [legend(LEFT, bottom + 40, kinds)] if len(kinds) > 1 else []
    return picture(WIDTH, bottom + (56 if footer else 30), title, [*parts, *footer])


def speedups() -> str:
    """Two ranks against one process."""
    cells = [row[1] for row in tables.rows("benchmarks.md", "what")[:2]]
    found = [(model, *match) for model, cell in zip(("Wan", "Flux"), cells, strict=True)
             for match in re.findall(r"`(\w+=2)` ([\d.]+)x and ([\d.]+)x", cell)]  # fmt: skip
    names = [f"{model}, {layout}" for model, layout, _, _ in found]
    values = [(float(large), float(small)) for _, _, large, small in found]
    return bars(
        "A step on two ranks against one process",
        names,
        values,
        ("4,096 tokens (Flux: 4,095)", "1,024 tokens (Flux: 1,023)"),
        2.2,
    )


def vae() -> str:
    """A VAE on two ranks against one."""
    rows = tables.rows("vae.md", "arguments to `python -m lab verify --ranks 2`")
    names = [found[1] for row in rows if (found := re.search(r"--vae (\w+)", row[0]))]
    return bars("Decoding on two ranks against one", names, [[tables.number(row[3])] for row in rows], ("decode",), 2.2)


def links() -> str:
    """Seconds of four steps by the speed of the link."""
    rows = tables.rows("approximate.md", "link")[1:]  # the first is without a limit
    layouts = ("pipe=2", "ulysses=2", "ring=2")
    title, bottom, high = "Seconds of 4 steps on two ranks, by the speed of the link", 270, 32.0

    def place(speed: float, seconds: float) -> tuple[float, float]:
        return 60 + 540 * math.log10(speed / 100), bottom - (bottom - TOP) * seconds / high

    parts = [text(20, 28, title, size=15), line([(60, TOP), (60, bottom), (610, bottom)], INK, width=1)]
    for seconds in range(0, 31, 10):
        parts.append(text(52, place(100, seconds)[1] + 4, f"{seconds} s", size=11, anchor="end"))
    for row in rows:
        x, _ = place(tables.number(row[0]), 0)
        parts.append(text(x, bottom + 17, f"{tables.number(row[0]):g}", size=11, anchor="middle"))
    for column, colour in zip(range(1, 4), RANKS, strict=False):
        points = [place(tables.number(row[0]), tables.number(row[column])) for row in rows]
        parts += [line(points, colour), *(dot(x, y, 4, colour) for x, y in points)]
    parts += [text(610, bottom + 34, "Mbit/s", size=11, anchor="end"), legend(60, bottom + 38, layouts)]
    return picture(WIDTH, bottom + 54, title, parts)


def quality() -> str:
    """How many attributes approximate pictures lose, with intervals."""
    rows = tables.rows("approximate.md", "layout | algorithm")[1:]  # the first is exact
    return _intervals("Attributes lost against exact pictures, in points (95 % interval)", rows)


def _intervals(title: str, rows: Sequence[Sequence[str]]) -> str:
    def scale(points: float) -> float:
        return LEFT + 90 + (points + 2) * 26

    bottom = TOP + len(rows) * 24
    parts = [text(20, 28, title, size=15)]
    for tick in range(0, 11, 2):
        parts += [
            line([(scale(tick), TOP - 4), (scale(tick), bottom)], PALE, width=1),
            text(scale(tick), bottom + 16, str(tick), size=11, anchor="middle"),
        ]
    for i, row in enumerate(rows):
        y, (mean, low, high) = TOP + 12 + 24 * i, (float(each) for each in re.findall(r"[-+][\d.]+", row[6]))
        colour = RANKS[("PipeFusion", "displaced patch", "naive patch").index(row[1])]
        parts.append(text(20, y + 4, f"{row[1]}, warm-up {row[2]}"))
        parts += [line([(scale(low), y), (scale(high), y)], colour, width=3), dot(scale(mean), y, 5, colour)]
    return picture(WIDTH, bottom + 30, title, parts)


PICTURES = {"speedups": speedups, "vae": vae, "links": links, "quality": quality}
"""What makes each plot, by its name."""
