"""Numbers from the tables of the documentation's pages, so that a plot shows what its page says."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table of a page whose heading begins with these cells.

    Raises:
        ValueError: the page has no such table.
    """
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")), None)
    if start is None:
        raise ValueError(f"{page} has no table that begins with {heading!r}")
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def number(cell: str) -> float:
    """Return the first number of a cell.

    Raises:
        ValueError: there is none.
    """
    found = re.search(r"[-+]?\d+(?:\.\d+)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} has no number")
    return float(found[0])
