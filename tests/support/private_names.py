"""Finds names in a program that other libraries do not promise to keep, and compares their signatures with a text."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

TOP_LEVEL_ONLY = ("accelerate", "diffusers", "gguf", "transformers")
"""Libraries that promise to keep what their top level exports, and nothing below it."""

_NAMED_TUPLE = ("_asdict", "_fields", "_make", "_replace")


def found(files: Iterable[Path]) -> dict[Path, set[str]]:
    """Return by file the names of other libraries that are private, or that lie where those libraries change freely.

    What is imported has its full name. Of an attribute it is not known whose it is, so it has its name alone.
    It is our own if its class is a file's own, or if our classes define it and a method uses it on ``self``.
    """
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    inherited = {name for tree in trees.values() for name in _defined(tree)}
    return {file: set(_Search(tree, inherited).names()) for file, tree in trees.items()}


def value_of(name: str) -> Any:
    """Return what a dotted name stands for. Parts that end with ``()`` are called.

    Raises:
        ImportError: there is no such module.
        AttributeError: there is no such attribute.
    """
    first, *rest = name.split(".")
    path = first
    value: Any = importlib.import_module(first)
    for part in rest:
        attribute = part.removesuffix("()")
        path = f"{path}.{attribute}"
        try:
            value = getattr(value, attribute)
        except AttributeError:
            if not inspect.ismodule(value):
                raise
            value = importlib.import_module(path)
        value = value() if part.endswith("()") else value
    return value


def parameters(function: Any) -> dict[str, bool]:
    """Return the parameters of a function or of one of torch's operators, and whether each has to be given."""
    if hasattr(function, "overloads"):
        return {each.name: not each.has_default_value() for each in function.default._schema.arguments}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    each = inspect.signature(function).parameters.values()
    return {one.name: one.default is one.empty and one.kind not in variable for one in each if one.name != "self"}


def fits(takes: str, actual: dict[str, bool], *, exactly: bool) -> bool:
    """Whether a function takes what it is given: ``a, b, *, c`` are two by position and one by name.

    Args:
        takes: what it is given.
        actual: see ``parameters``.
        exactly: whether it may take nothing else, since it is overridden by one that takes this alone.
    """
    by_position, _, by_name = takes.partition("*, ")
    places = [name for name in by_position.split(", ") if name]
    given = [*places, *(name for name in by_name.split(", ") if name)]
    others = actual.keys() - given
    return (
        list(actual)[: len(places)] == places
        and set(given) <= actual.keys()
        and not any(actual[name] for name in others)
        and not (exactly and others)
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in _NAMED_TUPLE


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield what a file defines: functions, classes, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                yield name


class _Search:
    """The search of one file."""

    def __init__(self, tree: ast.AST, inherited: set[str]) -> None:
        self._tree, self._inherited, self._own = tree, inherited, set(_defined(tree))
        self._imported: dict[str, str] = {}
        for node in ast.walk(tree):
            for name, bound, _ in _imports(node):
                self._imported[name] = bound

    def names(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            yield from (path for *_, path in _imports(node) if _is_foreign(path))
            match node:
                case ast.Attribute(value=owner, attr=name) if _is_private(name) and not self._is_ours(owner, name):
                    yield name
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                    args=[_, ast.Constant(value=str(name)), *_],
                ) if _is_private(name) and name not in self._own:
                    yield name
                case ast.ClassDef(bases=bases, body=body):
                    methods = [each.name for each in body if isinstance(each, ast.FunctionDef)]
                    yield from self._overridden(bases, [name for name in methods if _is_private(name)])

    def _is_ours(self, owner: ast.expr, name: str) -> bool:
        match owner:
            case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                return name in self._inherited
            case ast.Name(id=module) if self._imported.get(module) in sys.stdlib_module_names:
                return True
            case ast.Name(id=module) if module in self._imported:
                return False
        return name in self._own

    def _overridden(self, bases: list[ast.expr], methods: list[str]) -> Iterator[str]:
        """Yield the methods that another library's class has, too."""
        for base in bases if methods else []:
            root, *rest = ast.unparse(base).split(".")
            package = self._imported.get(root, "").partition(".")[0]
            if package and package not in sys.stdlib_module_names and _is_installed(package):
                parent = value_of(".".join([self._imported[root], *rest]))
                yield from (name for name in methods if hasattr(parent, name))


def _imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield the names that an absolute import binds, what each stands for, and what is imported."""
    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first, alias.name
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            for alias in aliases:
                path = f"{module}.{alias.name}"
                yield alias.asname or alias.name, path, path


def _is_foreign(path: str) -> bool:
    first, *rest = path.split(".")
    if first in sys.stdlib_module_names:
        return False
    return any(map(_is_private, rest)) or (first in TOP_LEVEL_ONLY and len(rest) > 1)


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
