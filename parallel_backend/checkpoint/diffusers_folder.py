"""A model folder in diffusers layout, read from its JSON files only: no weights, no diffusers."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from .checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint, StoredComponent, file_state
from .content import content_of
from .quantised import mark_of_compression
from .weight_headers import read_files

_OLD_CLASS = "Transformer2DModel"
_SPLIT = {"ada_norm_single": "PixArtTransformer2DModel", "ada_norm_zero": "DiTTransformer2DModel"}
"""Classes that ``_OLD_CLASS`` was split into, by ``norm_type``, as in diffusers' ``_CLASS_REMAPPING_DICT``."""

MAX_BYTES = 64 << 20
"""Largest JSON file in bytes. Indices of weights, the largest of these files, have less than 1 MB."""

_SINGLE_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")


class DiffusersFolder(Checkpoint):
    """A pipeline folder: ``model_index.json`` and a config for each component."""

    def __init__(self, path: Path) -> None:
        """Open a folder, and check that it is a diffusers pipeline with a transformer.

        Raises:
            InvalidRequest: it is not; the message names what is missing.
        """
        super().__init__(path)
        if not path.is_dir():
            raise InvalidRequest(f"{path} is not a folder; a model is a folder in diffusers layout, or a file")
        if not (path / "model_index.json").is_file():
            raise InvalidRequest(f"{path} is not a diffusers pipeline: it has no model_index.json")
        if "transformer" not in self.components:
            raise InvalidRequest(
                f"{path} has no transformer (its parts: {', '.join(self.components) or 'none'}); "
                "only diffusion transformers can run in parallel"
            )

    @cached_property
    def index(self) -> dict[str, Any]:
        return read_json(self.path / "model_index.json")

    @cached_property
    def components(self) -> dict[str, str]:
        pairs = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        classes = {name: value[1] for name, value in pairs.items() if value[1] and isinstance(value[1], str)}
        return {name: self._current_class(name) if kind == _OLD_CLASS else kind for name, kind in classes.items()}

    def _current_class(self, component: str) -> str:
        """Return the class that current diffusers loads for a checkpoint that names ``_OLD_CLASS``."""
        return _SPLIT.get(str(self.config(component).get("norm_type")), _OLD_CLASS)

    def stamp(self) -> str:
        """Covers names, sizes and modification times of configs and weights."""
        states = [(name, file_state(file)) for name, file in self._files()]
        return hashlib.sha256(repr(states).encode()).hexdigest()[:16]

    def content(self) -> str:
        return content_of(self._files())

    def _files(self) -> list[tuple[str, Path]]:
        """Return configs and weights, by their names in the folder."""
        files = [file for pattern in ("*.json", "*/*.json", "*/*.safetensors") for file in self.path.glob(pattern)]
        return [(str(file.relative_to(self.path)), file) for file in sorted(files)]

    def config(self, component: str) -> dict[str, Any]:
        """A component's config is its ``config.json``, a scheduler's ``scheduler_config.json``."""
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return read_json(self.path / component / name)

    def stored(self, component: str) -> StoredComponent:
        """diffusers and transformers, which load all but the diffusion transformers, ignore scales."""
        files = folder_files(self.path / component, self.config(component))
        if component not in (HIGH_NOISE, LOW_NOISE):
            _refuse_compressed(self.path / component, files)
        return StoredComponent(files=files, name=str(files[0]))


def _refuse_compressed(folder: Path, files: Iterable[Path]) -> None:
    name = mark_of_compression(read_files(files).tensors)
    if name is not None:
        raise InvalidRequest(
            f"{folder} has compressed weights ({name}), and in a folder only the transformer's may be: use plain "
            "weights (bf16, fp16 or fp32) or a single file"
        )


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


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        InvalidRequest: it cannot be read, is no regular file (a link may lead to a device, which has no end), is too
            large, or holds something else. The message quotes nothing of it.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, and {MAX_BYTES} is the limit")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file} does not contain a JSON object")
    return content
