"""The checkpoints that the loader offers: the shipped one, then ComfyUI's ``models/diffusers``."""

import os
from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ...parallel_backend.errors import InvalidRequest

SHIPPED: dict[str, Path] = {"shapes (shipped)": Path(__file__).parents[2] / "checkpoints" / "shapes"}


def listed_names() -> list[str]:
    """Return the names that the loader lists."""
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    installed = {str(path.relative_to(root)) for root in roots for path in _pipeline_folders(root)}
    return [*SHIPPED, *sorted(installed)]


def _pipeline_folders(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root, followlinks=True):
        if "model_index.json" in files:
            subfolders.clear()
            if Path(folder) != root:
                yield Path(folder)


def folder_of(name: str) -> Path:
    """Return the folder of a listed name, or of any other folder under ``models/diffusers``.

    Raises:
        InvalidRequest: there is no such folder.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    roots = [Path(root).absolute() for root in folder_paths.get_folder_paths("diffusers")]
    for root in roots:
        path = Path(os.path.normpath(root / name))
        if root in path.parents and path.is_dir():
            return path
    raise InvalidRequest(f"no model {name!r}; available: {', '.join(listed_names())}")
