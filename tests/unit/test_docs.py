"""Code that the documentation quotes is in the file that the quote names, links lead to files, and tables are whole."""

import re
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize(("file", "quoted"), QUOTES)
def test_quoted_code_is_there(file, quoted):
    assert quoted in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_quotes():
    assert len(QUOTES) >= 5


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{page.name}: {link}" for page, link in LINKS])
def test_links_lead_to_files(page, link):
    assert (page.parent / link).exists()


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
