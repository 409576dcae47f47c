"""Finds the files of a component's weights in a folder, as diffusers and transformers do. safetensors only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from .json_file import read_json

_SINGLE_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")


def folder_files(folder: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that a folder's index lists or, without an index, the single file of the usual name.

    Files of other variants, such as ``*.fp16.safetensors``, are ignored.

    Raises:
        InvalidRequest: the config has a quantisation of diffusers, there is no safetensors file of a known name, one is
            missing, or the index names another format or folder.
    """
    if "quantization_config" in config:
        raise InvalidRequest(f"{folder} is quantised, which is not supported yet; use plain weights")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(
            f"{folder} has no .safetensors file; weights in .bin or .pt files are not loaded, since opening one can "
            "run code: save the checkpoint again with safe_serialization=True"
        )
    for name in _SINGLE_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return tuple(_checked(index, each) for each in _listed(index))
    for name in _SINGLE_FILES:
        if (folder / name).is_file():
            return (folder / name,)
    raise InvalidRequest(
        f"{folder} has {files[0].name}, but weights are read from {' or '.join(_SINGLE_FILES)}: rename the file"
    )


def _listed(index: Path) -> list[Any]:
    try:
        return sorted(set(read_json(index)["weight_map"].values()))
    except (InvalidRequest, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{index} is not a valid index of weight files: download it again") from error


def _checked(index: Path, name: Any) -> Path:
    """Return the path of a file that an index lists; refuse other formats, other folders and missing files."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
        raise InvalidRequest(f"{index} lists {name!r}, which is not a .safetensors file in the same folder")
    if not (index.parent / name).is_file():
        raise InvalidRequest(f"{index.parent} lacks {name}, which {index.name} lists: download it again")
    return index.parent / name
