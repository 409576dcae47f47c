"""Code that the documentation quotes is in the file that the quote names, and links lead to existing files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
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
