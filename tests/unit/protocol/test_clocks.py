"""No deadline depends on the wall clock, which people and time servers set."""

import ast
from collections.abc import Iterator

from scripts.comfy_paths import ROOT

FOLDERS = ("parallel_backend", "nodes")
STAMPS = {
    "parallel_backend/supervisor/request_lines.py", "parallel_backend/doctor/report.py", "nodes/backend/activity.py",
}  # fmt: skip
"""What tells people when something happened."""
CERTIFICATES = {"parallel_backend/machines/certificates/authority.py", "parallel_backend/machines/certificates/tls.py"}
"""What reads and writes until when certificates are valid."""

COMPARED = {"parallel_backend/machines/nodes/session.py", "parallel_backend/machines/nodes/joined_host.py"}
"""What tells how far the clocks of two hosts are apart."""

FILES = {"parallel_backend/planner/record.py"}
"""What tells how long ago a file was written, which an earlier start of the machine may have done."""


def wall_clocks(tree: ast.AST) -> Iterator[int]:
    """The lines that read the wall clock: ``time.time``, ``datetime.now`` and their like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now"):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for name in node.names if name.name in ("time", "time_ns"))


def test_only_stamps_for_people_read_the_wall_clock() -> None:
    found = {
        str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if any(wall_clocks(ast.parse(file.read_text())))
    }
    assert found == STAMPS | CERTIFICATES | COMPARED | FILES
