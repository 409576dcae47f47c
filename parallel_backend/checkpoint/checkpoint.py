"""What a folder in diffusers layout holds, read from its JSON files alone: no weights, no diffusers."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest

HIGH, LOW = "transformer", "transformer_2"
"""The components, as diffusers names them."""

_OLD_CLASS = "Transformer2DModel"
_SPLIT = {"ada_norm_single": "PixArtTransformer2DModel", "ada_norm_zero": "DiTTransformer2DModel"}
"""By ``norm_type``, as in diffusers' own ``_CLASS_REMAPPING_DICT``."""


@dataclass(frozen=True)
class Checkpoint:
    """A pipeline folder: ``model_index.json`` and a config per component."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Check that a folder is a diffusers pipeline with a transformer.

        Raises:
            InvalidRequest: it is not; the message names what is missing.
        """
        checkpoint = cls(Path(path))
        if not checkpoint.path.is_dir():
            raise InvalidRequest(f"{path} is no folder; a model is a folder in diffusers layout")
        if not (checkpoint.path / "model_index.json").is_file():
            raise InvalidRequest(f"{path} is no diffusers pipeline: it has no model_index.json")
        if "transformer" not in checkpoint.components:
            raise InvalidRequest(
                f"{path} has no transformer (its parts: {', '.join(checkpoint.components) or 'none'}); "
                "only diffusion transformers can run in parallel"
            )
        return checkpoint

    @cached_property
    def index(self) -> dict[str, Any]:
        """``model_index.json``."""
        return self._read_json("model_index.json")

    @cached_property
    def components(self) -> dict[str, str]:
        """Class name by component name, without the components that are null."""
        pairs = {name: value for name, value in self.index.items() if isinstance(value, list) and len(value) == 2}
        found = {name: value[1] for name, value in pairs.items() if value[1]}
        return {name: self._renamed(name) if kind == _OLD_CLASS else kind for name, kind in found.items()}

    @cached_property
    def pipeline(self) -> str:
        """Class name of the pipeline, "" if there is none."""
        return str(self._read_json("model_index.json").get("_class_name", ""))

    def _renamed(self, component: str) -> str:
        """The class that diffusers loads today where a checkpoint names the one that it was split from."""
        return _SPLIT.get(self.config(component).get("norm_type", ""), _OLD_CLASS)

    def stamp(self) -> str:
        """A hash of the names, sizes and times of the folder's configs and weights, as they are now."""
        files = [file for pattern in ("*.json", "*/*.json", "*/*.safetensors") for file in self.path.glob(pattern)]
        states = [(str(file.relative_to(self.path)), _state(file)) for file in sorted(files)]
        return hashlib.sha256(repr(states).encode()).hexdigest()[:16]

    def config(self, component: str) -> dict[str, Any]:
        """The component's ``config.json`` (``scheduler_config.json`` for a scheduler).

        Raises:
            InvalidRequest: the file is missing or is no JSON object.
        """
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self._read_json(f"{component}/{name}")

    def boundary(self) -> float | None:
        """The timestep from which on ``transformer`` is meant, and below it ``transformer_2``; None without that.

        Raises:
            InvalidRequest: the two differ in their configs, or there is no ratio to switch at.
        """
        if "transformer_2" not in self.components:
            return None
        ratio = self.index.get("boundary_ratio")
        if not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise InvalidRequest(
                f"{self.path.name} has two transformers and boundary_ratio {ratio!r} in model_index.json: "
                "the switch between them needs a number between 0 and 1"
            )
        high, low = (_numbers(self.config(name)) for name in ("transformer", "transformer_2"))
        if high != low or self.components["transformer"] != self.components["transformer_2"]:
            raise InvalidRequest(f"{self.path.name} has two transformers with other configs; they need to be alike")
        return ratio * 1000.0

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise InvalidRequest(f"{file} holds no JSON object")
        return content


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what diffusers notes in it of where it came from."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _state(file: Path) -> tuple[int, int] | None:
    """Size and time of a file, None for a link that leads nowhere."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
