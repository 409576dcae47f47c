"""A model folder in diffusers layout, read from its JSON files only: no weights, no diffusers."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
"""diffusers' component names of the transformers for high and for low noise."""

_OLD_CLASS = "Transformer2DModel"
_SPLIT = {"ada_norm_single": "PixArtTransformer2DModel", "ada_norm_zero": "DiTTransformer2DModel"}
"""Classes that ``_OLD_CLASS`` was split into, by ``norm_type``, as in diffusers' ``_CLASS_REMAPPING_DICT``."""


@dataclass(frozen=True)
class Checkpoint:
    """A pipeline folder: ``model_index.json`` and a config for each component."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Open a folder, and check that it is a diffusers pipeline with a transformer.

        Raises:
            InvalidRequest: it is not; the message names what is missing.
        """
        checkpoint = cls(Path(path))
        if not checkpoint.path.is_dir():
            raise InvalidRequest(f"{path} is not a folder; a model is a folder in diffusers layout")
        if not (checkpoint.path / "model_index.json").is_file():
            raise InvalidRequest(f"{path} is not a diffusers pipeline: it has no model_index.json")
        if "transformer" not in checkpoint.components:
            raise InvalidRequest(
                f"{path} has no transformer (its parts: {', '.join(checkpoint.components) or 'none'}); "
                "only diffusion transformers can run in parallel"
            )
        return checkpoint

    @cached_property
    def index(self) -> dict[str, Any]:
        """The content of ``model_index.json``."""
        return self._read_json("model_index.json")

    @cached_property
    def components(self) -> dict[str, str]:
        """Class name of each component that is not null, by component name."""
        pairs = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        classes = {name: value[1] for name, value in pairs.items() if value[1]}
        return {name: self._current_class(name) if kind == _OLD_CLASS else kind for name, kind in classes.items()}

    @cached_property
    def pipeline(self) -> str:
        """Class name of the pipeline; "" if the index names none."""
        return str(self._read_json("model_index.json").get("_class_name", ""))

    def _current_class(self, component: str) -> str:
        """Return the class that current diffusers loads for a checkpoint that names ``_OLD_CLASS``."""
        return _SPLIT.get(self.config(component).get("norm_type", ""), _OLD_CLASS)

    def stamp(self) -> str:
        """Return a hash of the names, sizes and modification times of the folder's current configs and weights."""
        files = [file for pattern in ("*.json", "*/*.json", "*/*.safetensors") for file in self.path.glob(pattern)]
        states = [(str(file.relative_to(self.path)), _state(file)) for file in sorted(files)]
        return hashlib.sha256(repr(states).encode()).hexdigest()[:16]

    def config(self, component: str) -> dict[str, Any]:
        """Return the component's ``config.json`` (``scheduler_config.json`` for a scheduler).

        Raises:
            InvalidRequest: the file is missing or is not a JSON object.
        """
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self._read_json(f"{component}/{name}")

    def boundary(self) -> float | None:
        """Return the timestep (0 .. 1000) below which ``transformer_2`` is used instead of ``transformer``.

        None if there is no ``transformer_2``.

        Raises:
            InvalidRequest: the configs of the two differ, or the index has no valid ``boundary_ratio``.
        """
        if "transformer_2" not in self.components:
            return None
        ratio = self.index.get("boundary_ratio")
        if not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise InvalidRequest(
                f"{self.path.name} has two transformers, and boundary_ratio {ratio!r} in model_index.json: "
                "switching between them needs a number between 0 and 1"
            )
        high, low = (_without_metadata(self.config(name)) for name in ("transformer", "transformer_2"))
        if high != low or self.components["transformer"] != self.components["transformer_2"]:
            raise InvalidRequest(f"{self.path.name} has two transformers with different configs; they must be the same")
        return ratio * 1000.0

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise InvalidRequest(f"{file} does not contain a JSON object")
        return content


def _without_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the entries in which diffusers records its origin."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _state(file: Path) -> tuple[int, int] | None:
    """Return size and modification time (ns) of a file; None for a broken link."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
