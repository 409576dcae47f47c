"""What follows from the repository's address in ``pyproject.toml``.

It is the addresses of icon and banner for the Comfy Registry, and the module that tells the page.
"""

import re

from scripts.comfy_paths import ROOT

PROJECT = ROOT / "pyproject.toml"
MODULE = ROOT / "web" / "repository.js"
PICTURES = {"Icon": "docs/pictures/icon.svg", "Banner": "docs/pictures/banner.svg"}
"""The registry wants at most 800 x 400 pixels, and 21 to 9."""


def raw(repository: str, file: str) -> str:
    """Return the address of a file's content in a repository on GitHub.

    Raises:
        ValueError: the repository is elsewhere.
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", repository)
    if found is None:
        raise ValueError(f"Repository = {repository!r} in pyproject.toml: it must be https://github.com/OWNER/NAME")
    return f"https://raw.githubusercontent.com/{found[1]}/{found[2]}/main/{file}"


def repository(text: str) -> str:
    """Return the address in a project file's text.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r'^Repository = "([^"]*)"', text, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no Repository")
    return found[1]


def project(text: str) -> str:
    """Return the project file's text with the addresses in their places."""
    for key, file in PICTURES.items():
        text = re.sub(rf'^{key} = "[^"]*"', f'{key} = "{raw(repository(text), file)}"', text, flags=re.MULTILINE)
    return text


def module(text: str) -> str:
    """Return the text of the page's module for a project file's text."""
    said = "/**\n * Where the code is. python -m scripts.generate writes this from pyproject.toml.\n *\n * @module\n */"
    return f'{said}\nexport const REPOSITORY = "{repository(text)}";\n'


def write() -> None:
    """Write them."""
    text = project(PROJECT.read_text(encoding="utf-8"))
    PROJECT.write_text(text, encoding="utf-8")
    MODULE.write_text(module(text), encoding="utf-8")
