"""What ComfyUI's process remembers of our nodes lies in one session, which a test replaces."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "nodes/backend/session.py: _session": "the session itself: ComfyUI locks its node classes",
    "nodes/remote/transformer.py: _signature": "a memo of a pure function",
}
"""Variables of modules, and why each may be one. Constants, types and loggers have other names."""


def variables(file: Path) -> Iterator[str]:
    """Yield the variables of a module: names that begin with a small letter, apart from underscores."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [each for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]
        yield from (each.id for each in names if each.id.lstrip("_")[:1].islower())


def test_no_module_of_the_nodes_or_the_client_has_a_variable_of_its_own() -> None:
    files = [file for folder in ("nodes", "parallel_backend/client") for file in (ROOT / folder).rglob("*.py")]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in variables(file) if name != "log"}
    assert len(files) > 80
    assert found == ALLOWED.keys()


def test_variables_are_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "KNOWN = 1\nPart = int\n_said: set[str] = set()\na, _b = [], {}\ndef f():\n    global c\n    d = 1\n"
    )
    assert sorted(variables(file)) == ["_b", "_said", "a", "c"]
