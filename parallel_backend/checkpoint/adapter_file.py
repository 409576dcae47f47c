"""A file with the low-rank factors of a LoRA (https://arxiv.org/abs/2106.09685), which ComfyUI's process writes.

It is a safetensors file. For layer ``i`` it holds ``{i}.up`` ``[rows, rank]`` and ``{i}.down`` ``[rank, columns]``, and
its metadata says which weight each layer changes. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .safetensors_file import check_id, read_header, read_metadata


@dataclass(frozen=True, kw_only=True)
class AdapterLayer:
    """One changed weight: ``scale * up @ down`` is added to some of its rows.

    Attributes:
        weight: name of the weight, as ComfyUI calls it.
        start: the first of the changed rows. There are as many as ``up`` has.
        scale: the factor, without the strength.
    """

    weight: str
    start: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """What the header of the file says.

    Attributes:
        layers: in the order of their numbers.
        shapes: shape of every weight of the model by ComfyUI's names, from which the rows of fused weights follow.
    """

    layers: tuple[AdapterLayer, ...]
    shapes: Mapping[str, tuple[int, ...]]


def metadata(layers: Sequence[AdapterLayer], shapes: Mapping[str, Sequence[int]], file_id: str) -> dict[str, str]:
    """Return the metadata of a file. ``file_id`` is ``Adapter.id``."""
    return {
        "id": file_id,
        "layers": json.dumps([asdict(layer) for layer in layers]),
        "shapes": json.dumps({name: list(shape) for name, shape in shapes.items()}),
    }


def read(path: Path, file_id: str) -> AdapterFile:
    """Read the header of a file that this module's ``metadata`` describes.

    Raises:
        InvalidRequest: it is not a safetensors file, has another id, or its metadata are not what ``metadata`` returns.
    """
    found = read_header(path).metadata
    check_id(path, found, file_id)
    layers = read_metadata(path, found, "layers", tuple[AdapterLayer, ...])
    shapes = read_metadata(path, found, "shapes", dict[str, tuple[int, ...]])
    return AdapterFile(layers=layers, shapes=shapes)
