"""Packages that raise while they are imported, for a folder that comes first on the module path."""

from collections.abc import Iterable
from pathlib import Path

ERRORS = ("ImportError", "OSError", "RuntimeError")
IMPORTED = "imported.txt"
"""The file in the folder that lists which of them somebody tried to import."""


def write(folder: Path, names: Iterable[str], *, version: str = "99.0", errors: tuple[str, ...] = ERRORS) -> Path:
    """Write packages with metadata, which raise the errors in turn, and return the folder."""
    for number, name in enumerate(names):
        package, metadata = folder / name, folder / f"{name}-{version}.dist-info"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"with open({str(folder / IMPORTED)!r}, 'a') as file:\n    print({name!r}, file=file)\n"
            f"raise {errors[number % len(errors)]}({name!r} + ' does not work here')\n"
        )
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "top_level.txt").write_text(f"{name}\n")
        (metadata / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return folder


def imported(folder: Path) -> set[str]:
    """Return the packages that somebody tried to import."""
    path = folder / IMPORTED
    return set(path.read_text().split()) if path.exists() else set()
