"""What the documentation quotes, names and links to is there, and its tables are whole."""

import re
from pathlib import Path

import pytest
import yaml

from lab.__main__ import COMMANDS as LAB_COMMANDS
from parallel_backend.__main__ import _COMMANDS as BACKEND_COMMANDS
from tests.support import named_in_docs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")])
QUOTES = [
    quote
    for page in PAGES
    for quote in re.findall(r"```python\n# (\S+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
LINKS = [
    (page, link)
    for page in PAGES
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    if not link.startswith("http")
]
NAMING = [page for page in [*PAGES, *ROOT.glob("web/docs/*.md")] if page.name != "CHANGELOG.md"]
"""The pages about what there is today."""


@pytest.mark.parametrize(("file", "quoted"), QUOTES)
def test_quoted_code_is_there(file, quoted):
    assert quoted in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_quotes():
    assert len(QUOTES) >= 5


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{page.name}: {link}" for page, link in LINKS])
def test_links_lead_to_files(page, link):
    assert (page.parent / link).exists()


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_commands_and_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    missing = {f"{each.program} {each.words}": each.missing() for each in named_in_docs.commands(text)}
    assert {command: what for command, what in missing.items() if what} == {}
    assert named_in_docs.missing_paths(text) == []


def test_the_reference_has_every_command():
    named = list(named_in_docs.commands((ROOT / "docs" / "reference.md").read_text(encoding="utf-8")))
    found = {program: {named_in_docs.command_of(program, each.words) for each in named if each.program == program}
             for program in ("lab", "parallel_backend")}  # fmt: skip
    assert found["lab"] - {None} == set(LAB_COMMANDS)
    assert found["parallel_backend"] - {None} == {command.name for command in BACKEND_COMMANDS}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`python -m lab bench wires --rounds 3`", ["lab bench wires --rounds 3"]),
        ("or python -m lab synchronise", ["lab synchronise"]),
        ("`python -m lab bench wire --round-trips`", ["--round-trips"]),
        ("`python -m parallel_backend start`", ["parallel_backend start"]),
        ("`python -m parallel_backend serve --spare 1`", ["--spare"]),
        ("`python -m scripts.nodes`", ["scripts.nodes"]),
        ("`python -m tests.fuzz --seconds 3`", ["--seconds"]),
        ("`bash scripts/tests.sh`", ["scripts/tests.sh"]),
        ("```\nbash scripts/test.sh --slow\n```", ["--slow"]),
        ("| `python -m lab ...` | x |\n|---|---|\n| `bench wire` | x |\n| `bench old` | x |\n", ["lab bench old"]),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(text: str, missing: list[str]):
    assert [what for command in named_in_docs.commands(text) for what in command.missing()] == missing


def test_a_file_that_does_not_exist_is_noticed():
    text = "`tests/unit/test_dogs.py`, `rank/spare.py`, `sparer.py`, `parallel_backend/host`, `models/vae`, `guests/`"
    missing = ["tests/unit/test_dogs.py", "sparer.py", "parallel_backend/host", "guests"]
    assert named_in_docs.missing_paths(text) == missing


def test_every_folder_of_tests_says_when_it_runs():
    folders = {f"{file.parent.name}/" for file in ROOT.glob("tests/*/*.py")}
    named = re.findall(r"^\| `(\w+/)` \|", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(folders)


def test_workflows_name_versions_of_actions_and_commands_that_exist():
    files = list((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    for file in files:
        jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        actions = [step["uses"] for step in steps if "uses" in step]
        assert [action for action in actions if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", action)] == []
        paths = re.findall(r"\b(?:scripts|tests)/[\w./]+", " ".join(step.get("run", "") for step in steps))
        assert [path for path in paths if not (ROOT / path).exists()] == []
        assert all(job["timeout-minutes"] for job in jobs.values())
