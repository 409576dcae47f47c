"""The checkpoints that the loader offers: the shipped one, folders in ``models/diffusers``, and model files."""

import os
from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ...parallel_backend.checkpoint.opening import open_checkpoint
from ...parallel_backend.checkpoint.single_file import SUFFIXES
from ...parallel_backend.checkpoint.weight_headers import GGUF_SUFFIX
from ...parallel_backend.errors import InvalidRequest

SHIPPED: dict[str, Path] = {"shapes (shipped)": Path(__file__).parents[2] / "checkpoints" / "shapes"}

FILE_KINDS = ("diffusion_models", "checkpoints")
"""ComfyUI's kinds of model files that hold a diffusion model. A file's name begins with its kind."""

GGUF_KINDS = ("diffusion_models", "unet_gguf")
"""The kinds whose folders may hold GGUF files, which ComfyUI does not list. ComfyUI-GGUF has the second one."""

VAE_KIND = "vae"
"""ComfyUI's kind of files that hold a VAE alone."""


def listed_names() -> list[str]:
    """Return the names that the loader lists."""
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    installed = {str(path.relative_to(root)) for root in roots for path in _pipeline_folders(root)}
    files = [f"{kind}/{name}" for kind in FILE_KINDS for name in sorted(folder_paths.get_filename_list(kind))]
    return [*SHIPPED, *sorted(installed), *(name for name in files if name.lower().endswith(SUFFIXES)), *_gguf_names()]


def _gguf_names() -> list[str]:
    """Return the names of GGUF files, each under the first kind with its folder."""
    names: dict[str, str] = {}
    for kind in GGUF_KINDS:
        for folder in folder_paths.get_folder_paths(kind) if kind in folder_paths.folder_names_and_paths else ():
            for name in sorted(folder_paths.recursive_search(folder, excluded_dir_names=[".git"])[0]):
                if name.lower().endswith(GGUF_SUFFIX):
                    names.setdefault(os.path.join(folder, name), f"{kind}/{name}")
    return list(dict.fromkeys(names.values()))


def _pipeline_folders(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root, followlinks=True):
        if "model_index.json" in files:
            subfolders.clear()
            if Path(folder) != root:
                yield Path(folder)


def path_of(name: str) -> Path:
    """Return the path of a listed name, of any other folder under ``models/diffusers``, or of any other model file.

    Raises:
        InvalidRequest: there is no such folder or file.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    kind, _, file = name.partition("/")
    places = [(kind, file)] if kind in (*FILE_KINDS, *GGUF_KINDS, VAE_KIND) else [(each, name) for each in FILE_KINDS]
    found = [path for place in places if (path := folder_paths.get_full_path(*place)) is not None]
    if len(found) > 1:
        raise InvalidRequest(f"{name} is a file in {' and in '.join(FILE_KINDS)}: write {FILE_KINDS[0]}/{name}")
    roots = [Path(root).absolute() for root in folder_paths.get_folder_paths("diffusers")]
    for root in roots:
        folder = Path(os.path.normpath(root / name))
        if root in folder.parents and folder.is_dir():
            return folder
    if found:
        return Path(found[0])
    raise InvalidRequest(f"no model {name!r}; available: {', '.join(listed_names())}")


def stamp(name: str) -> str:
    """Return a stamp of a model's files, which changes when they do; "" if the model cannot be opened."""
    try:
        return open_checkpoint(path_of(name)).stamp()
    except InvalidRequest:
        return ""


def is_file(name: str) -> bool:
    """Whether a name belongs to a model file."""
    try:
        return path_of(name).is_file()
    except InvalidRequest:
        return False
