"""The page docs/measured.md, made from what benchmarks of single steps print with ``--json``.

Another measurement: ``python -m lab bench ... --json > docs/measured/NAME.json``, then ``python -m scripts.generate``.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from parallel_backend.layout.parallel_layout import ParallelLayout
from scripts.comfy_paths import ROOT
from scripts.docs_pictures.plots import bars

PAGE = ROOT / "docs" / "measured.md"
FOLDER = ROOT / "docs" / "measured"
HEAD = """\
# Steps by size and layout

Each table and each picture is made by `python -m scripts.generate` from what its command has printed with `--json`, \
which lies in `docs/measured/`. In each round every contestant runs one step after the other. The speedup is the \
median over the rounds, and in brackets that of the fastest steps. The last column is the largest difference from one \
process's prediction. More ranks than cores show that they compute the same, and are no faster. \
[Benchmarks](benchmarks.md) has the other figures.
"""


class Case(msgspec.Struct, frozen=True):
    """See ``lab.bench.ranks.cases``."""

    family: str
    tokens: int
    branches: int
    frames: int = 0


class Row(msgspec.Struct, frozen=True):
    """See ``lab.bench.step.run``."""

    name: str
    ours: bool
    speedup: float
    fastest: float
    max_rel_error: float


class Table(msgspec.Struct, frozen=True):
    """See ``lab.bench.step.run``."""

    case: Case
    rows: tuple[Row, ...]


class Document(msgspec.Struct, frozen=True):
    """See ``lab.bench.results``."""

    command: str
    machine: dict[str, str | tuple[str, ...]]
    results: tuple[Table, ...]


def documents() -> dict[str, Document]:
    """Return every measurement by its file's name without the ending."""
    files = sorted(FOLDER.glob("*.json"), key=lambda file: file.stem)
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=Document) for file in files}


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(name, document) for name, document in documents().items())])


def section(name: str, document: Document) -> str:
    """Return the part of the page about one measurement."""
    machine = dict(document.machine)
    devices, kernels = machine.pop("devices"), machine.pop("kernels", ())
    where = ", ".join([*dict.fromkeys(devices), *(f"{key} {value}" for key, value in machine.items()), *kernels])
    head = ["layout", *(_words(table) for table in document.results), "difference"]
    lines = [head, ["---"] * len(head), *_cells(document.results)]
    return "\n".join(
        [
            f"## {_title(document.results)}\n",
            f"`{document.command}`, on {where}.\n",
            f"![Speedups over one process, {document.results[0].case.family}](pictures/measured-{name}.svg)\n",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


def _title(tables: tuple[Table, ...]) -> str:
    """Return the family, and how many ranks compute."""
    ranks = {ParallelLayout.parse(name).ranks for name in _names(tables)}
    numbers = " and ".join(map(str, sorted(ranks)))
    return f"{tables[0].case.family.capitalize()} on {numbers} ranks"


def _words(table: Table) -> str:
    return " ".join(filter(None, (_size(table), _kind(table))))


def _size(table: Table) -> str:
    return f"{table.case.tokens:,} tokens"


def _kind(table: Table) -> str:
    frames = f"in {table.case.frames} frames" if table.case.frames else ""
    return " ".join(filter(None, (frames, "with guidance" if table.case.branches > 1 else "")))


def _cells(tables: tuple[Table, ...]) -> Iterator[list[str]]:
    for name in _names(tables):
        rows = [next((row for row in table.rows if row.name == name), None) for table in tables]
        error = max(row.max_rel_error for row in rows if row)
        yield [
            f"`{name}`", *(f"{row.speedup:.2f}x ({row.fastest:.2f}x)" if row else "" for row in rows), f"{error:.0e}",
        ]  # fmt: skip


def _names(tables: tuple[Table, ...]) -> list[str]:
    """Return the names of all contestants but the one that others are compared with."""
    return list(dict.fromkeys(row.name for table in tables for row in table.rows if row.ours))


def pictures() -> dict[str, str]:
    """Return a chart of each measurement by its name."""
    return {f"measured-{name}": _picture(document.results) for name, document in documents().items()}


def _picture(tables: tuple[Table, ...]) -> str:
    found = {row.name: [each.speedup for t in tables for each in t.rows if each.name == row.name]
             for table in tables for row in table.rows if row.ours}  # fmt: skip
    complete = {name: values for name, values in found.items() if len(values) == len(tables)}
    most = max(value for values in complete.values() for value in values)
    sizes, (first, *others) = [_size(table) for table in tables], [_kind(table) for table in tables]
    shared = [*sizes[: len(sizes) == 1], first] if {*others} <= {first} else []
    title = ", ".join([f"A step against one process, {tables[0].case.family}", *filter(None, shared)])
    kinds = sizes if shared else [_words(table) for table in tables]
    return bars(title, list(complete), list(complete.values()), kinds, most + 0.2)


def write(path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")
