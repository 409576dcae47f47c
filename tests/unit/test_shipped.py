"""What the registry's package holds: git's files less those that ``.comfyignore`` names, as comfy-cli makes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS_ALONE = ("lab", "scripts", "tests", "training")
NEEDED = ("nodes", "parallel_backend", "web", "locales", "workflows", "subgraphs", "checkpoints")
"""What ComfyUI, the nodes and ``python -m parallel_backend`` import and show."""
IMPORTED = """
import sys
import parallel_backend.__main__, parallel_backend.rank.__main__, parallel_backend.client.retry
from parallel_backend.rank import spare
from parallel_backend.verify import command
for _ in spare.imports():
    pass
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])))
"""


def listed(*options: str) -> set[str]:
    """The files that git knows."""
    command = ["git", "ls-files", "-z", "--cached", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(filter(None, done.stdout.split("\0")))


@pytest.fixture(scope="module")
def shipped() -> set[str]:
    """The files that users download."""
    return listed() - listed("--ignored", "--exclude-from=.comfyignore")


def test_nothing_ships_that_is_for_who_works_on_the_project(shipped):
    assert not [name for name in shipped if name.partition("/")[0] in OURS_ALONE]
    assert not [name for name in shipped if name.startswith(("constraints", "requirements-", ".github"))]


def test_all_that_runs_and_shows_ships(shipped):
    everything = listed()
    for folder in NEEDED:
        files = {name for name in everything if name.startswith(f"{folder}/")}
        assert files
        assert files <= shipped
    assert {"__init__.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"} <= shipped


def test_pictures_of_pages_that_ship_ship(shipped):
    for page in [ROOT / name for name in shipped if name.endswith(".md")]:
        for link in re.findall(r"!\[[^]]*\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).resolve().relative_to(ROOT.resolve()).as_posix() in shipped


def test_a_prompt_imports_nothing_else():
    """What a rank imports until its first request ends, and the command line: none of it is left out."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *OURS_ALONE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
