"""A transformer's weights under ComfyUI's names, put together from its files, whatever those call them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.architectures import find_architecture
from ..checkpoint.checkpoint import Checkpoint
from ..errors import InvalidRequest
from .row_map import Rows, Shape
from .weight_source import WeightSource, comfyui_rows


def read_original(
    checkpoint: Checkpoint, component: str, shapes: Mapping[str, Shape], names: Sequence[str]
) -> Iterator[Tensor]:
    """Yield weights, decoded, in their dtypes in the files; in float32 if that is smaller than 16 bits.

    Args:
        shapes: shape of every weight of the transformer by ComfyUI's names.

    Raises:
        InvalidRequest: the transformer has no such weight.
    """
    class_name = checkpoint.components[component]
    architecture = find_architecture(class_name)
    source = WeightSource(checkpoint.stored(component), class_name)
    parts: dict[str, list[tuple[str, Rows]]] = {}
    for parameter, rows in comfyui_rows(shapes, class_name).items():
        parts.setdefault(rows.source, []).append((parameter, rows))
    for name in names:
        if name not in parts:
            beside = source.beside(name)  # of a layer that runs in ComfyUI's process
            if beside is None:
                raise InvalidRequest(f"{checkpoint.name} has no weight {name} that can be changed")
            yield beside.reshape(shapes[name])
            continue
        in_rows = shapes[name] if architecture is None else architecture.shape(name, tuple(shapes[name]))
        yield _joined(source, parts[name], in_rows).reshape(shapes[name])


def _joined(source: WeightSource, parts: Sequence[tuple[str, Rows]], shape: Shape) -> Tensor:
    joined = torch.empty(shape, dtype=source.dtype(parts[0][0]))
    for parameter, rows in parts:
        part = torch.empty(source.shape(parameter), dtype=joined.dtype)
        source.read(parameter, 0, None, None, into=part)
        if not shape:
            return part.reshape(())
        position = 0
        for span in rows.spans:
            count = span.stop - span.start
            joined[span] = part[position : position + count].reshape(count, *shape[1:])
            position += count
    assert sum(rows.count for _, rows in parts) == (shape[0] if shape else 1), parts
    return joined
