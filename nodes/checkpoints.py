"""The checkpoints that the loader offers: the shipped one, then ComfyUI's ``models/diffusers``."""

import os
from pathlib import Path

import folder_paths

from ..parallel_backend.errors import InvalidRequest

SHIPPED: dict[str, Path] = {"shapes (shipped)": Path(__file__).parent.parent / "checkpoints" / "shapes"}


def names() -> list[str]:
    """What the loader lists."""
    found = {
        str(Path(folder).relative_to(root))
        for root in folder_paths.get_folder_paths("diffusers")
        for folder, _, files in os.walk(root, followlinks=True)
        if "model_index.json" in files and Path(folder) != Path(root)
    }
    return [*SHIPPED, *sorted(found)]


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
