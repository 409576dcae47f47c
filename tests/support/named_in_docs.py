"""Commands and files that the documentation names, and which of them are missing."""

import argparse
import importlib
import importlib.util
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from lab.__main__ import COMMANDS as LAB_COMMANDS
from parallel_backend.__main__ import _COMMANDS as BACKEND_COMMANDS

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "nodes", "parallel_backend", "lab", "scripts", "tests", "training", "docs", "web", "locales", "checkpoints",
    "workflows",
    "subgraphs",
)  # fmt: skip
"""Those of the checkout whose files documentation names."""
COMFYUIS = "comfy/"
"""What a path begins with that is ComfyUI's."""
_COMMAND = re.compile(r"(python -m|bash) ([\w./]+)([^`|;#\n]*)")
_TABLE = re.compile(r"^\| `(python -m \w+) \.\.\.` \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"(?<![\w./~$-])[\w./-]+")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


class Named(NamedTuple):
    """A command as a page writes it.

    Attributes:
        program: a module or a shell script.
        words: what stands behind it, such as ``bench wire --rounds 3``.
    """

    program: str
    words: str

    def missing(self) -> list[str]:
        """Return what of it does not exist: the program, the command, or options."""
        if self.program in ("lab", "parallel_backend"):
            return self._missing_of_parser()
        file = ROOT / self.program if self.program.endswith(".sh") else _source(self.program)
        return self._unwritten(file) if file is not None and file.is_file() else [self.program]

    def _missing_of_parser(self) -> list[str]:
        name = command_of(self.program, self.words)
        if name is None:
            return (
                []
                if self.words.strip() in ("", "--help", "--version", "...")
                else [f"{self.program} {self.words.strip()}"]
            )
        options = {"--help", *_OPTION.findall(_parser(self.program, name).format_help())}
        return [option for option in _OPTION.findall(self.words) if option not in options]

    def _unwritten(self, file: Path) -> list[str]:
        """Return the options that the program's text does not have."""
        text = file.read_text(encoding="utf-8")
        return [option for option in _OPTION.findall(self.words) if option not in text]


def commands(text: str) -> Iterator[Named]:
    """Yield the commands of a page, and of its tables below ``python -m lab ...``."""
    for _, program, words in _COMMAND.findall(text):
        if program.endswith(".sh") or "/" not in program:
            yield Named(program.rstrip("."), words)
    for program, rows in _TABLE.findall(text):
        for words in re.findall(r"^\| `([^`]+)`", rows, re.MULTILINE):
            yield Named(program.split()[-1], words)


def command_of(program: str, words: str) -> str | None:
    """Return the command of ``lab`` or ``parallel_backend`` that these words begin with, or None."""
    heads = list(takewhile(re.compile(r"[a-z][a-z-]*").fullmatch, words.split()))
    if program == "lab":
        name = " ".join(heads[:2])
        return name if name in LAB_COMMANDS else None
    return next((command.name for command in BACKEND_COMMANDS if [command.name] == heads[:1]), None)


def missing_paths(text: str) -> list[str]:
    """Return the files and folders between backticks that the checkout lacks, and that no command makes.

    Git ignores what commands make. A page may leave out the front of a path: ``rank/spare.py``.
    """
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if _is_kept(file)]
    there = {f"/{each.relative_to(ROOT)}" for file in files for each in (file, *file.parents) if ROOT in each.parents}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    there |= {f"/{each.strip('/')}" for each in ignored if each.endswith("/")}
    paths = [word.rstrip("/.") for code in _CODE.findall(text) for word in _WORD.findall(code) if _is_ours(word)]
    return [path for path in paths if not any(each.endswith(f"/{path}") for each in there)]


def _is_kept(file: Path) -> bool:
    return file.is_file() and file.suffix != ".pyc"


def _is_ours(word: str) -> bool:
    if word.startswith(COMFYUIS):
        return False
    return bool(re.search(r"\w/$|\.(?:py|sh)$", word)) or word.startswith(tuple(f"{folder}/" for folder in FOLDERS))


def _parser(program: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name)
    if program == "lab":
        importlib.import_module(f"lab.{LAB_COMMANDS[name].module}").add_arguments(parser)
    else:
        next(command for command in BACKEND_COMMANDS if command.name == name).add_arguments(parser)
    return parser


def _source(module: str) -> Path | None:
    """Return the file that ``python -m`` runs, or None."""
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return None
    return Path(found.origin) if found is not None and found.origin else None
