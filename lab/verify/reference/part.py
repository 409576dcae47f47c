"""One part of a folder of references: a JSON description with tensors beside it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from parallel_backend.errors import InvalidRequest


@dataclass(frozen=True)
class Part:
    """A part, of the kind that its name says.

    Attributes:
        file: its JSON.
    """

    file: Path

    @property
    def name(self) -> str:
        """The kind of the part."""
        return self.file.stem

    @cached_property
    def described(self) -> dict[str, Any]:
        """What the JSON says.

        Raises:
            InvalidRequest: it is no JSON object.
        """
        try:
            described = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{self.file} cannot be read as JSON: {error}") from error
        if not isinstance(described, dict):
            raise InvalidRequest(f"{self.file} holds no JSON object")
        return described

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by name, in float32 if they are floating-point numbers.

        Raises:
            InvalidRequest: the file is missing, or lacks a tensor that the JSON describes.
        """
        tensors = self.load(f"{self.name}.safetensors")
        missing = [name for name in self.entry("tensors") if name not in tensors]
        if missing:
            raise InvalidRequest(f"{self.name}.safetensors lacks {missing[0]}, which {self.file.name} describes")
        return tensors

    def entry(self, name: str) -> Any:
        """Return an entry of the JSON.

        Raises:
            InvalidRequest: there is none.
        """
        if name not in self.described:
            raise InvalidRequest(f"{self.file} has no entry {name!r}")
        return self.described[name]

    def load(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file of the folder, in float32 if they are floating-point numbers.

        Raises:
            InvalidRequest: the file cannot be read.
        """
        try:
            tensors = load_file(self.file.parent / name)
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"{self.file.parent / name} cannot be read: {error}") from error
        return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}

    def cells(self, mark: str) -> list[str]:
        """Return the names of the cells that have a tensor ``CELL.MARK``, such as ``in.latent``."""
        ending = f".{mark}"
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    def under(self, *path: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with a cell and a role, such as ``in``, by the rest of their names."""
        prefix = ".".join(path) + "."
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            InvalidRequest: there is none of this name.
        """
        if name not in self.tensors:
            raise InvalidRequest(f"{self.name}.safetensors lacks {name}")
        return self.tensors[name]


def load_weights(module: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights in a module's names, all of them.

    Raises:
        InvalidRequest: one is missing, left over or of another shape.
    """
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidRequest(f"the reference's weights do not fit {type(module).__name__}: {error}") from error
