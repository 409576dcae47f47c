"""The version of Parallel DiT, which ``pyproject.toml`` alone says."""

import importlib.metadata
import re
from pathlib import Path

NAME = "parallel-dit"
_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_HEAD = re.compile(r'^\[project\]\nname = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)


def version() -> str:
    """Return the version: of the extension's folder, or of the installed wheel."""
    if _PROJECT.is_file():
        found = _HEAD.search(_PROJECT.read_text(encoding="utf-8"))
        if found is not None and found[1] == NAME:
            return found[2]
    return importlib.metadata.version(NAME)


if __name__ == "__main__":
    print(version())
