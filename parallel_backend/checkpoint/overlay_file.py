"""A file with changed weights of a model's transformers, which ComfyUI's process writes.

It is a safetensors file. A weight's name is ``{component}.{ComfyUI's name}``, such as
``transformer.double_blocks.0.img_mod.lin.bias``. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .safetensors_file import check_id, read_header, read_metadata
from .stored_tensor import StoredTensor


@dataclass(frozen=True, kw_only=True)
class OverlayFile:
    """What the header of the file says about one transformer.

    Attributes:
        tensors: the changed weights by ComfyUI's names.
        shapes: shape of every weight of the model by ComfyUI's names, from which the rows of fused weights follow.
    """

    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]]


def metadata(shapes: Mapping[str, Sequence[int]], file_id: str) -> dict[str, str]:
    """Return the metadata of a file. ``file_id`` is ``Overlay.id``."""
    return {"id": file_id, "shapes": json.dumps({name: list(shape) for name, shape in shapes.items()})}


def read(path: Path, file_id: str, component: str) -> OverlayFile:
    """Read the header of a file that this module's ``metadata`` describes.

    Raises:
        InvalidRequest: it is not a safetensors file, has another id, or its metadata are not what ``metadata`` returns.
    """
    header, start = read_header(path), f"{component}."
    check_id(path, header.metadata, file_id)
    return OverlayFile(
        tensors={name.removeprefix(start): each for name, each in header.tensors.items() if name.startswith(start)},
        shapes=read_metadata(path, header.metadata, "shapes", dict[str, tuple[int, ...]]),
    )
