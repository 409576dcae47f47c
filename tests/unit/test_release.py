"""What a release is made of: one version, one address of the repository, the registry's fields, and workflows."""

import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel_backend.__main__ import main
from parallel_backend.version import version
from scripts import registry

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WORKFLOWS = {
    file.name: yaml.safe_load(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
CONTRIBUTORS = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/releasing.md"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/*.md"), *ROOT.glob(".github/**/*.md")]
PUBLISHED = re.findall(r'"(\w+)"', "".join(re.findall(r"^published = \[(.*)\]", PROJECT, re.MULTILINE)))
CLAIMS = {
    "registry": (r"comfy node (registry-)?install parallel-dit", r"registry\.comfy\.org"),
    "index": (r"pip install parallel[-_]dit(?![\w/*-])", r"pypi\.org"),
}
"""What no page may say before it is true."""


def field(key: str) -> str:
    """Return a text of the project file by its key."""
    found = re.search(rf'^{key} = "([^"]+)"', PROJECT, re.MULTILINE)
    assert found, f"pyproject.toml has no {key}"
    return found[1]


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def runs(workflow: dict[str, Any]) -> list[str]:
    """Return the commands of a workflow's steps, one line each."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line.strip() for step in steps for line in step.get("run", "").splitlines()]


# The version


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert version() == field("version")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"parallel-dit {version()}\n")


def test_no_other_file_says_the_version() -> None:
    """The changelog and the notes on upgrading name versions that were released."""
    said = re.compile(rf"""(?:__version__|\bversion) *[=:] *["']{re.escape(version())}["']""")
    files = tracked("*.py", "*.toml", "*.yml", "*.json", "*.cfg", "*.js")
    found = [file for file in files if said.search(file.read_text(encoding="utf-8"))]
    assert found == [ROOT / "pyproject.toml"]


def test_the_changelog_ends_at_the_version_or_before_it() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), re.MULTILINE)
    assert released[0] == version()


def test_every_released_version_says_what_to_do() -> None:
    released = re.findall(r"^## \[(\d+\.\d+)\.0\]", read("CHANGELOG.md"), re.MULTILINE)
    steps = re.findall(r"^## From (\S+) to (?:the next version|(\S+))$", read("docs/upgrading.md"), re.MULTILINE)
    assert steps == [(released[0], ""), *zip(released[1:], released[:-1], strict=True)]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The address


def test_the_address_of_the_repository_is_in_one_place() -> None:
    address = field("Repository")
    owner_and_name = address.removeprefix("https://github.com/")
    found = [file for file in tracked() if file.suffix not in (".png", ".jpg") and owner_and_name in _text(file)]
    assert found == [ROOT / "pyproject.toml", registry.MODULE]
    assert registry.MODULE.read_text(encoding="utf-8") == registry.module(PROJECT), "run python -m scripts.generate"
    assert registry.project(PROJECT) == PROJECT, "run python -m scripts.generate"
    assert PROJECT.count(owner_and_name) == 3


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def test_icon_and_banner_follow_the_address() -> None:
    moved = registry.project(PROJECT.replace(field("Repository"), "https://github.com/someone/else"))
    assert "https://raw.githubusercontent.com/someone/else/main/docs/pictures/icon.svg" in moved
    with pytest.raises(ValueError, match="it must be https://github"):
        registry.project(PROJECT.replace(field("Repository"), "https://elsewhere.example/code"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_claims_what_is_not_published(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    claims = [claim for place, claims in CLAIMS.items() if place not in PUBLISHED for claim in claims]
    assert [found[0] for claim in claims if (found := re.search(claim, text))] == []


@pytest.mark.parametrize("claim", ["`comfy node install parallel-dit`", "run pip install parallel-dit"])
def test_a_claim_is_noticed(claim: str) -> None:
    assert any(re.search(each, claim) for claims in CLAIMS.values() for each in claims)


def test_places_of_publication_are_known() -> None:
    assert set(PUBLISHED) <= set(CLAIMS)


# The registry


def test_the_registry_gets_what_it_asks_for() -> None:
    """What ``comfy node validate`` reads of the project file, and the registry's rules for it."""
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,99}", field("name"))
    assert not field("name").startswith("comfy")
    assert re.fullmatch(r"\d+\.\d+\.\d+", field("version"))
    assert re.fullmatch(r"[a-z][a-z0-9-]*", field("PublisherId"))
    assert field("DisplayName")
    assert len(field("description")) > 20
    assert re.fullmatch(r">=\d+\.\d+\.\d+", field("requires-comfyui"))
    assert re.search(r'^license = \{ file = "LICENSE" \}', PROJECT, re.MULTILINE)
    assert (ROOT / "LICENSE").is_file()
    assert (ROOT / "requirements.txt").is_file()


def test_the_registrys_ruff_rules_find_nothing() -> None:
    """``comfy node validate`` warns of exec, eval and several statements in a line, and means to refuse them."""
    command = ["ruff", "check", ".", "--quiet", "--select", "S102,S307,E702", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("key", "width", "height"), [("Icon", 400, 400), ("Banner", 1260, 540)])
def test_icon_and_banner_have_the_registrys_size(key: str, width: int, height: int) -> None:
    root = ElementTree.parse(ROOT / registry.PICTURES[key]).getroot()
    assert (root.get("width"), root.get("height")) == (str(width), str(height))
    assert (width <= 800 and height <= 400) if key == "Icon" else width * 9 == height * 21


# The workflows


def test_the_workflows_are_there() -> None:
    assert set(WORKFLOWS) == {"checks.yml", "docs.yml", "gpu.yml", "publish.yml"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_alone_and_says_how_long_it_may_take(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())
    assert all(("uses" in step) != ("run" in step) for job in workflow["jobs"].values() for step in job["steps"])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_what_the_contributors_pages_say(name: str) -> None:
    wanted = []
    for line in runs(WORKFLOWS[name]):
        for command in re.findall(r"(?:bash scripts/|python -m |mkdocs |pip wheel )[^;\"|)]*", line):
            words = command.split()
            program = " ".join(words[: 3 if words[1] == "-m" else 2])
            wanted += [" ".join([program, *(word for word in words if word.startswith("--"))])]
    known = [line for line in wanted if not line.startswith(("python -m venv", "python -m parallel_backend.version"))]
    assert known
    assert [each for each in known if not _is_said(each)] == []


def _is_said(command: str) -> bool:
    program, *options = re.split(r" (?=--)", command)
    return any(program in line and all(option in line for option in options) for line in CONTRIBUTORS.splitlines())


def test_a_command_that_no_page_says_is_noticed() -> None:
    assert _is_said("bash scripts/test.sh --quick")
    assert not _is_said("bash scripts/test.sh --quickly")
    assert not _is_said("bash scripts/tests.sh")


def test_who_proposes_a_change_runs_no_code_on_the_gpus_machine_and_publishes_nothing() -> None:
    """YAML 1.1 reads the key ``on`` as true."""
    assert set(WORKFLOWS["gpu.yml"][True]) == {"workflow_dispatch"}
    assert set(WORKFLOWS["publish.yml"][True]) == {"push", "workflow_dispatch"}
    assert set(WORKFLOWS["publish.yml"][True]["push"]) == {"tags"}
    own = {name for name, each in WORKFLOWS.items() for job in each["jobs"].values() if "self-hosted" in job["runs-on"]}
    assert own == {"gpu.yml"}


def test_the_tag_has_to_be_the_version() -> None:
    (line,) = [line for line in runs(WORKFLOWS["publish.yml"]) if "GITHUB_REF_NAME" in line]
    for tag, status in ((f"v{version()}", 0), ("v9.9.9", 1)):
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, timeout=60, check=False
        )
        assert done.returncode == status
