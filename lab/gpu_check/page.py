"""The page about what the checks found."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

INTRODUCTION = """\
# What the check on GPUs has found

Made by `bash scripts/gpu_check.sh`. Machine: {machine}. Commit: {commit}. Each part runs as far as the machine allows.
"""

_LARGE = 1000
"""Numbers from here on are shown without a fraction."""
_LOG = re.compile(r" \(log: [^)]*\)")
"""The part of an error that names a file which is gone after the check."""


def page(parts: Iterable[Mapping[str, Any]], *, machine: str, commit: str) -> str:
    """Return the page's text.

    Args:
        parts: the content of each part's file.
        machine: the GPUs and the versions.
        commit: of this repository.
    """
    parts = list(parts)
    sections = [_section(part) for part in parts]
    return "\n".join([INTRODUCTION.format(machine=machine, commit=commit), *_left_out(parts), *sections])


def _left_out(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a list of the checks that did not run here."""
    lines = [
        f"- {part['number']}. {outcome['title']}: {outcome['left_out']}"
        for part in parts
        for outcome in part["outcomes"]
        if outcome["left_out"]
    ]
    return ["## Left out\n", *lines, ""] if lines else []


def _section(part: Mapping[str, Any]) -> str:
    lines = [f"## {part['number']}. {part['title']}", "", "| check | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {each['title']} | {each['status']} | {each['seconds']:.0f} |" for each in part["outcomes"]]
    for outcome in part["outcomes"]:
        lines += _figures(outcome["title"], outcome["figures"])
    return "\n".join(lines) + "\n"


def _figures(title: str, figures: Mapping[str, Any]) -> list[str]:
    """Return a table of figures: a row each, with name and value."""
    if not figures:
        return []
    rows = [f"| {name} | {_text(value)} |" for name, value in figures.items()]
    return ["", f"| {title} | |", "|---|---|", *rows]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < _LARGE else f"{value:.0f}"
    if isinstance(value, dict):
        nested = any(isinstance(each, dict) for each in value.values())
        separator, colon = ("; ", ":") if nested else (", ", "")
        return separator.join(f"{name}{colon} {_text(each)}" for name, each in value.items())
    return _LOG.sub("", str(value))
