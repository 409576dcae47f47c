"""The checkpoints that the loader offers: the shipped one, then ComfyUI's ``models/diffusers``."""

import os
from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ...parallel_backend.errors import InvalidRequest

SHIPPED: dict[str, Path] = {"shapes (shipped)": Path(__file__).parents[2] / "checkpoints" / "shapes"}


def names() -> list[str]:
    """What the loader lists."""
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    found = {str(path.relative_to(root)) for root in roots for path in _models(root)}
    return [*SHIPPED, *sorted(found)]


def _models(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root, followlinks=True):
        if "model_index.json" in files:
            inner.clear()
            if Path(folder) != root:
                yield Path(folder)


def folder(name: str) -> Path:
    """The folder of a listed name, or of any other folder under ``models/diffusers``.

    Raises:
        InvalidRequest: there is none.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    roots = [Path(root).absolute() for root in folder_paths.get_folder_paths("diffusers")]
    for root in roots:
        path = Path(os.path.normpath(root / name))
        if root in path.parents and path.is_dir():
            return path
    raise InvalidRequest(f"no model {name!r}; there are: {', '.join(names())}")
