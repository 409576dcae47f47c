"""What a file uses of ComfyUI, as far as its source shows it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE = {
    "api_server", "app", "comfy", "comfy_api", "comfy_api_nodes", "comfy_config", "comfy_execution", "comfy_extras",
    "cuda_malloc", "execution", "folder_paths", "latent_preview", "main", "middleware", "node_helpers", "nodes",
    "protocol", "server", "utils",
}  # fmt: skip
"""Top-level modules of ComfyUI. In absolute imports ``nodes`` and ``utils`` are ComfyUI's."""


@dataclass(frozen=True, order=True)
class Use:
    """A dotted name of ComfyUI that a line imports or reads.

    Attributes:
        path: the name.
        file: the file.
        line: the line.
        quoted: whether the line passes the last part as a string, to ``getattr`` or ``hasattr``.
    """

    path: str
    file: str
    line: int
    quoted: bool = False


def uses(file: Path, name: str) -> list[Use]:
    """Every use in a file, which the result calls ``name``."""
    visitor = _Visitor()
    visitor.visit(ast.parse(file.read_text(encoding="utf-8")))
    return [Use(path, name, line, quoted) for path, line, quoted in visitor.found]


def words(file: Path) -> set[str]:
    """Identifiers, parts of imported names, and strings of a file; from longer strings also names of nodes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        found.update(_words_of(node))
    return found


def _words_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
        yield from re.findall(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b", node.value)


class _Visitor(ast.NodeVisitor):
    """Follows imports and local names such as ``management = comfy.model_management``."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, bool]] = []
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.split(".")[0]
            if first in CORE:
                self.found.append((alias.name, node.lineno, False))
                self._names[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").split(".")[0] not in CORE:
            return
        for alias in node.names:
            self.found.append((f"{node.module}.{alias.name}", node.lineno, False))
            self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = dict(self._names)
        self.generic_visit(node)
        self._names = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if ast.unparse(node.func) not in ("getattr", "hasattr"):
            return
        owner, name = self._path(node.args[0]), node.args[1]
        if owner and isinstance(name, ast.Constant) and isinstance(name.value, str):
            self.found.append((f"{owner}.{name.value}", node.lineno, True))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for left, right in pairs:
                if isinstance(left, ast.Name):
                    self._rename(left.id, self._path(right))

    def _rename(self, name: str, path: str | None) -> None:
        if path:
            self._names[name] = path
        else:
            self._names.pop(name, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        else:
            self.found.append((path, node.lineno, False))

    def _path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None
