"""A model on disk: its components, their diffusers classes and configs, and where their weights are. No torch."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from .stored_tensor import StoredTensor
from .weight_headers import read_files, weights_under

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
"""diffusers' component names of the transformers for high and for low noise."""


@dataclass(frozen=True, kw_only=True)
class StoredComponent:
    """Where a component's weights are.

    Attributes:
        files: its safetensors or GGUF files.
        prefix: the beginning of its names in the files, which other components' names lack.
        native: whether the names are the model's original ones, which diffusers' converter maps.
        name: what messages call the files.
        missing_part: a file that belongs to the model by another file's name, and does not exist.
    """

    files: tuple[Path, ...]
    name: str
    prefix: str = ""
    native: bool = False
    missing_part: Path | None = None


class Checkpoint(ABC):
    """A model on disk, a folder or a file. Reads no weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path.name

    @property
    @abstractmethod
    def components(self) -> Mapping[str, str]:
        """Diffusers' class name of each component, by diffusers' component name."""

    @abstractmethod
    def config(self, component: str) -> dict[str, Any]:
        """Return the config of the component's class.

        Raises:
            InvalidRequest: there is none, or it cannot be read.
        """

    @abstractmethod
    def stored(self, component: str) -> StoredComponent:
        """Return where the component's weights are.

        Raises:
            InvalidRequest: weights are missing, or stored in a way that cannot be read.
        """

    def stored_dtype(self, component: str) -> str:
        """Return the dtype of most of the component's numbers, see ``StoredTensor.dtype``.

        Raises:
            InvalidRequest: see ``stored``.
        """
        return self.stored_numbers(component).most_common(1)[0][0]

    def stored_numbers(self, component: str) -> Counter[str]:
        """Return how many numbers of each dtype the component has, as ComfyUI counts its parameters.

        Raises:
            InvalidRequest: see ``stored``.
        """
        counts: Counter[str] = Counter()
        for tensor in self.weights(component).values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return counts

    def is_described(self, component: str) -> bool:
        """Whether the files describe how ComfyUI is to compute with compressed weights, as scaled ones do.

        Raises:
            InvalidRequest: see ``stored``.
        """
        compressions = (tensor.compression for tensor in self.weights(component).values())
        return any(compression is not None and compression.scales for compression in compressions)

    def left_over(self, component: str) -> frozenset[str]:
        """Return names of weights that the component's class is known to have no use for, as ComfyUI's has not."""
        return frozenset()

    def weights(self, component: str) -> Mapping[str, StoredTensor]:
        """Return the component's weights by the files' names, without what those begin with.

        Raises:
            InvalidRequest: see ``stored``.
        """
        stored = self.stored(component)
        return weights_under(stored.prefix, read_files(stored.files))

    @abstractmethod
    def stamp(self) -> str:
        """Return a hash of the current state of the files, which changes when one of them does."""

    @abstractmethod
    def content(self) -> str:
        """Return a hash of what the files hold, which is the same for copies of them, see ``content_of``.

        Raises:
            InvalidRequest: a file cannot be read.
        """

    def check_known(self, component: str) -> None:
        """Refuse a component that a file holds but that cannot be used.

        Raises:
            InvalidRequest: its architecture is not known, or its weights have a dtype that cannot be read. A folder
                without the component is not refused.
        """
        return

    @property
    def index(self) -> Mapping[str, Any]:
        """The content of ``model_index.json``, or nothing."""
        return {}

    @property
    def pipeline(self) -> str:
        """Class name of the pipeline; "" if it is not known."""
        return str(self.index.get("_class_name", ""))

    def boundary(self) -> float | None:
        """Return the timestep (0 .. 1000) below which ``transformer_2`` is used instead of ``transformer``.

        None if there is no ``transformer_2``.

        Raises:
            InvalidRequest: the configs of the two differ, or the index has no valid ``boundary_ratio``.
        """
        if LOW_NOISE not in self.components:
            return None
        ratio = self.index.get("boundary_ratio")
        if not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise InvalidRequest(
                f"{self.name} has two transformers, and boundary_ratio {ratio!r} in model_index.json: "
                "switching between them needs a number between 0 and 1"
            )
        high, low = (_without_metadata(self.config(name)) for name in (HIGH_NOISE, LOW_NOISE))
        if high != low or self.components[HIGH_NOISE] != self.components[LOW_NOISE]:
            raise InvalidRequest(f"{self.name} has two transformers with different configs; they must be the same")
        return ratio * 1000.0


def file_state(file: Path) -> tuple[int, int] | None:
    """Return size and modification time (ns) of a file; None for a broken link."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _without_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the entries in which diffusers records its origin."""
    return {name: value for name, value in config.items() if not name.startswith("_")}
