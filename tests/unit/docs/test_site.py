"""The documentation builds as a site, strictly, and every link of the site leads somewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.exceptions import PluginError

from scripts import docs_site

ROOT = Path(__file__).parents[3]
BUILT_FROM = ("docs", "mkdocs.yml", "pyproject.toml", "scripts/docs_site.py")
LINKED_TO = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "checkpoints", "lab", "parallel_backend",
    "scripts/core_contract", "tests", "web",
)  # fmt: skip
"""What pages are made of or link to, besides."""


def build(site: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout into a folder. With ``--quiet``, ``--strict`` would not see warnings."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=cwd,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class Page(HTMLParser):
    """What a page links to, what it can be linked to by, and the text outside of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        loaded = {"link": "href", "script": "src", "img": "src"}.get(tag)
        if loaded in values and values.get("rel") != "canonical":
            self.loads.append(values[loaded])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site by its file."""
    return {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html") if file.name != "404.html"}


def test_every_page_is_there(pages: dict[Path, Page], site: Path) -> None:
    names = {file.relative_to(site).parent.as_posix() for file in pages}
    wanted = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"index"}
    wanted |= {f"node/{file.stem}" for file in (ROOT / "web" / "docs").glob("*.md")}
    assert wanted <= names


def test_every_link_leads_to_a_page_and_a_place_of_it(pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{file.parent.name}: {link}")
    assert broken == []


def test_links_out_of_the_site_lead_to_files_of_the_repository(pages: dict[Path, Page]) -> None:
    repository = re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert repository
    links = [link for page in pages.values() for link in page.links if link.startswith(repository[1] + "/")]
    paths = [unquote(re.sub(r"^/(blob|tree)/main/|#.*", "", link[len(repository[1]) :])) for link in links]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert [load for page in pages.values() for load in page.loads if urlsplit(load).netloc] == []


def test_tables_and_code_are_rendered(pages: dict[Path, Page], site: Path) -> None:
    raw = re.compile(r"<(?:p|li)>(?:```|\| )")
    assert [file for file in pages if raw.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("link", ["nowhere.md", "../tests/nowhere.py", "pictures/nowhere.svg"])
def test_a_link_to_a_file_that_does_not_exist_is_refused(link: str) -> None:
    with pytest.raises(PluginError, match=r"docs/install\.md links to .*nowhere"):
        docs_site.target("install.md", link)


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("install.md", "reference.md#gpus", "reference.md#gpus"),
        ("install.md", "../web/docs/ParallelVAE.md", "node/ParallelVAE.md"),
        ("node/ParallelVAE.md", "../../docs/vae.md", "../vae.md"),
        ("project/CONTRIBUTING.md", "docs/hosts.md#set-up", "../hosts.md#set-up"),
        ("project/tests.md", "../CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("install.md", "#with-git", "#with-git"),
        ("install.md", "https://example.org/", "https://example.org/"),
    ],
)
def test_links_inside_the_site(page: str, link: str, target: str) -> None:
    assert docs_site.target(page, link) == target


def test_a_place_that_a_page_lacks_ends_the_build(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in BUILT_FROM:
        (checkout / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, checkout / name)
    for name in LINKED_TO:
        (checkout / name).symlink_to(ROOT / name)
    page = checkout / "docs" / "upgrading.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[there](install.md#nowhere)\n", encoding="utf-8")
    done = build(tmp_path / "site", checkout)
    assert done.returncode != 0
    assert "#nowhere" in done.stdout + done.stderr
