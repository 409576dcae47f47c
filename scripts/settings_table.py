"""The table of environment variables in docs/reference.md, made from ``parallel_backend/env.py``."""

from parallel_backend import env
from scripts.comfy_paths import ROOT

PAGE = ROOT / "docs" / "reference.md"
BEGIN, END = "<!-- made by python -m scripts.generate -->\n", "<!-- end -->\n"
_BY = {"user": "", "tests and lab": " Only tests and the lab use it.", "backend": " The backend sets it."}


def table() -> str:
    """Return the lines of the table."""
    rows = [
        f"| `{each}` | {each.type} | {each.unset} | {each.meaning}{_BY[each.set_by]} |"
        for each in sorted(env.variables(), key=lambda each: list(_BY).index(each.set_by))
    ]
    return "\n".join(["| variable | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def page(text: str) -> str:
    """Return the page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def write() -> None:
    """Write the table into the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
