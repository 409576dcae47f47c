"""The addresses of icon and banner for the Comfy Registry, in ``pyproject.toml``, made from that of the repository."""

import re

from scripts.comfy_paths import ROOT

PROJECT = ROOT / "pyproject.toml"
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


def write() -> None:
    """Write them."""
    PROJECT.write_text(project(PROJECT.read_text(encoding="utf-8")), encoding="utf-8")
