"""A few shapes of SVG, as text. All lengths are pixels."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

RANKS = ("#4a63d8", "#e07b28", "#2a9d8f", "#b5478b")
"""The colours of rank 0 and on."""
INK, PALE, PAPER = "#20242c", "#d5d9e2", "#ffffff"
_FONT = "font-family='DejaVu Sans,Verdana,Arial,sans-serif'"


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", colour: str = INK) -> str:
    """Return a line of text, whose baseline is at ``y``."""
    style = f"{_FONT} font-size='{size}' text-anchor='{anchor}' fill='{colour}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, colour: str, *, radius: float = 2.0) -> str:
    """Return a filled rectangle."""
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius:g}' fill='{colour}'/>"


def line(points: Iterable[tuple[float, float]], colour: str, *, width: float = 2.0) -> str:
    """Return a line through points."""
    joined = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='{width:g}'/>"


def dot(x: float, y: float, radius: float, colour: str) -> str:
    """Return a filled circle."""
    return f"<circle cx='{x:g}' cy='{y:g}' r='{radius:g}' fill='{colour}'/>"


def arrow(x: float, y: float, length: float, words: str = "") -> str:
    """Return an arrow to the right, with words above it."""
    end = x + length
    head = line([(end - 8, y - 5), (end, y), (end - 8, y + 5)], INK)
    return line([(x, y), (end, y)], INK) + head + text(x + length / 2, y - 9, words, size=12, anchor="middle")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells in rows and columns, with a title above and names of both directions.

    Attributes:
        title: above the cells.
        rows, columns: how many there are.
        colour: the colour of a cell by its row and column.
        down, across: what the rows and the columns are.
        cell: the width and the height of a cell.
        words: what stands in a cell.
    """

    title: str
    rows: int
    columns: int
    colour: Callable[[int, int], str]
    down: str = ""
    across: str = ""
    cell: tuple[float, float] = (26, 18)
    words: Callable[[int, int], str] = lambda row, column: ""

    @property
    def width(self) -> float:
        """The width of all cells."""
        return self.columns * self.cell[0]

    def at(self, x: float, y: float) -> str:
        """Return the grid with its first cell's corner at a point."""
        width, height = self.cell
        parts = [text(x, y - 24, self.title), text(x, y - 7, self.across, size=11)]
        middle = y + self.rows * height / 2
        turned = text(x - 8, middle, self.down, size=11, anchor="middle")
        parts.append(f"<g transform='rotate(-90 {x - 8:g} {middle:g})'>{turned}</g>")
        for row in range(self.rows):
            for column in range(self.columns):
                left, top = x + column * width, y + row * height
                parts.append(box(left, top, width - 2, height - 2, self.colour(row, column)))
                if words := self.words(row, column):
                    place = (left + width / 2 - 1, top + height / 2 + 3)
                    parts.append(text(*place, words, size=11, anchor="middle", colour=PAPER))
        return "".join(parts)


def legend(x: float, y: float, names: Iterable[str]) -> str:
    """Return a row of colours with their names."""
    parts = []
    for name, colour in zip(names, RANKS, strict=False):
        parts.append(box(x, y - 11, 13, 13, colour) + text(x + 19, y, name, size=12))
        x += 19 + 8 * len(name) + 22
    return "".join(parts)


def picture(width: float, height: float, title: str, parts: Iterable[str], *, paper: bool = True) -> str:
    """Return a file's text. The title is for who cannot see the picture; without ``paper`` nothing is behind it."""
    size = f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'><title>{escape(title)}</title>"
    body = "".join(f"\n{part}" for part in ([box(0, 0, width, height, PAPER, radius=8)] * paper + list(parts)))
    return f"{head}{body}\n</svg>\n"
