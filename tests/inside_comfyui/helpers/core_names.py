"""Every name that ComfyUI's own source reads off an object."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import comfy

ROOT = Path(comfy.__path__[0]).parent
OTHERS = ("custom_nodes", "tests", "tests-unit", "script_examples")
"""Folders of a checkout that are not ComfyUI's own code, or do not run in its process."""
ASKING = ("getattr", "hasattr", "setattr", "delattr")


@cache
def core_names() -> frozenset[str]:
    """Return the names of all attributes in the source of the ComfyUI that runs."""
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in OTHERS]
    return frozenset(name for path in files for name in _names(ast.parse(path.read_bytes())))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
