"""The weights of one component on disk, by the names of diffusers' parameters, whatever the files call them."""

import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.architectures import architecture_of, find_architecture, in_shape
from ..checkpoint.checkpoint import StoredComponent
from ..checkpoint.dtypes import TORCH_DTYPES
from ..checkpoint.overlay_file import OverlayFile
from ..checkpoint.stored_tensor import Compression, StoredTensor, check_readable
from ..checkpoint.weight_headers import read_files, weights_under
from ..errors import InvalidRequest
from ..progress import PROGRESS
from .decoding import decode
from .row_map import Rows, Shape, converted, identity
from .scales import check_scales, read_scale
from .stored_bytes import opened

log = logging.getLogger(__name__)

_MOST_NAMED = 3
"""How many superfluous weights the log names."""

PACKED = "packed"
"""Name of the parameter with the bytes of a layer's compressed weight. Its scales are named as in ``Compression``."""

_CHANGED = "changed:"
"""The beginning of the names of changed weights, which the files may have under the same names, too."""

_SCALES = ("tensor_scale", "row_scale", "block_scale", "input_scale")


class WeightSource:
    """Weight files, and the rows of their tensors that make up each parameter.

    A file is mapped only while a tensor is read, so that its pages do not stay in the process's memory. All ranks of a
    machine read through the same page cache.

    Attributes:
        overlaid: names of the parameters that an overlay changes.
    """

    def __init__(self, stored: StoredComponent, class_name: str) -> None:
        self._tensors = in_shape(class_name, weights_under(stored.prefix, read_files(stored.files)))
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._rows = published_rows(shapes, class_name) if stored.native else identity(shapes)
        self._name, self._missing_part = stored.name, stored.missing_part
        self._class_name = class_name
        self.overlaid: frozenset[str] = frozenset()

    def with_overlay(self, overlay: OverlayFile) -> "WeightSource":
        """Return a source that reads changed weights where there are some, and the others as this one does."""
        rows = comfyui_rows(overlay.shapes, self._class_name)
        changed = {name: each for name, each in rows.items() if each.source in overlay.tensors}
        tensors = in_shape(self._class_name, overlay.tensors)
        source = copy(self)
        source._tensors = self._tensors | {_CHANGED + name: each for name, each in tensors.items()}
        renamed = {name: replace(each, source=_CHANGED + each.source) for name, each in changed.items()}
        source._rows = self._rows | renamed
        source.overlaid = frozenset(changed)
        return source

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, counted: bool = False) -> None:
        """Check the files against the shapes of all tensors of the whole model.

        All ranks then refuse the same files, even if only one of them would read the tensor in question.

        Args:
            counted: whether the number of blocks was counted in the files. A block that is left over then means that
                another one is missing.

        Raises:
            InvalidRequest: a tensor is missing, has another shape or an invalid scale, or a block is left
                over.
        """
        missing = [name for name in shapes if name not in self._rows]
        if missing:
            remedy = f"{self._missing_part} does not exist" if self._missing_part else "download the model again"
            raise InvalidRequest(f"{self._name} lacks {len(missing)} weights ({missing[0]}, ...): {remedy}")
        for name, shape in shapes.items():
            self._check_shape(name, shape)
        self._check_unused(shapes, counted=counted)
        try:
            for source in dict.fromkeys(self._rows[name].source for name in shapes):
                check_readable(self._tensors[source])
                check_scales(self._tensors[source])
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._name}: {error}") from error

    def compression(self, name: str) -> Compression | None:
        """Return how a parameter is compressed, if its rows can be read one by one without being decoded."""
        stored = self._tensors[self._rows[name].source] if name in self._rows else None
        if stored is None or stored.compression is None or not stored.compression.in_rows(stored.shape):
            return None
        return stored.compression

    def _check_shape(self, name: str, shape: Shape) -> None:
        found, compression = self.shape(name), self._tensors[self._rows[name].source].compression
        if found[:1] != shape[:1] or _squeezed(found) != _squeezed(shape):
            if compression is not None and compression.is_padded(found, shape):
                raise InvalidRequest(
                    f"{name} is padded from {list(shape)} to {list(found)} in {self._name}, and padded "
                    f"{compression.format} is not supported: use an fp8, INT8 or GGUF file of the model instead"
                )
            raise InvalidRequest(
                f"{name} has shape {list(found)} in {self._name}, but {list(shape)} in the config: download the model "
                "again"
            )

    def _check_unused(self, shapes: Mapping[str, Shape], *, counted: bool) -> None:
        used = {self._rows[name].source for name in shapes} | _unused(self._class_name)
        superfluous = [name for name in self._tensors if name not in used]
        if not superfluous:
            return
        for name in superfluous:
            self._check_beside(name, used)
            if counted and any(first in used for first in _in_first_block(name)):
                raise InvalidRequest(f"{self._name} has {name} and lacks a block before it: download the model again")
        named = ", ".join(superfluous[:_MOST_NAMED])
        log.warning("%d weights of %s have no use: %s", len(superfluous), self._name, named)

    def _check_beside(self, name: str, used: Container[str]) -> None:
        """Refuse a superfluous tensor in a layer with a compressed weight: it may change what the weight's bytes mean.

        Raises:
            InvalidRequest: names it.
        """
        layer, _, kind = name.rpartition(".")
        weight = f"{layer}.weight"
        if kind != "bias" and weight in used and self._tensors[weight].compression is not None:
            raise InvalidRequest(
                f"{self._name} has {name} beside the compressed {weight}, which is not known: use an fp8, INT8, NVFP4 "
                "or GGUF file of the model that ComfyUI itself reads"
            )

    def read(self, name: str, dim: int, parts: tuple[slice, ...] | None, rows: slice | None, into: Tensor) -> None:
        """Read part of a parameter, decoded, or part of the bytes or the scales of a compressed one.

        Args:
            dim: the dim that ``parts`` slices.
            parts: slices along ``dim``, which are concatenated in this order; None for the whole dim.
            rows: rows of the result to keep; None for all.
            into: the tensor to fill.
        """
        PROGRESS.tick()
        owner, kind = self._owner(name)
        wanted = self._rows[owner]
        if parts is not None and dim == 0:
            wanted, parts = wanted.take(parts), None
        if rows is not None:
            wanted = wanted.take((rows,))
        with self._opened(self._tensors[wanted.source], kind, into.dtype) as read:
            if not into.ndim:
                into.copy_(read(slice(None)))
                return
            position = 0
            for span in wanted.spans:
                count = span.stop - span.start
                part = _cut(read(span), dim, parts)
                into[position : position + count].copy_(part.reshape(count, *into.shape[1:]))
                position += count

    def beside(self, name: str) -> Tensor | None:
        """Return a tensor of the files by its name there, decoded; None if there is none.

        Raises:
            InvalidRequest: it has an unknown dtype, or an invalid scale.
        """
        stored = self._tensors.get(name)
        if stored is None:
            return None
        check_readable(stored)
        check_scales(stored)
        dtype = torch.float32 if stored.compression else TORCH_DTYPES[stored.dtype]
        with self._opened(stored, "", dtype) as read:
            return read(slice(None)).to(dtype if dtype.itemsize >= 2 else torch.float32, copy=True)

    def _owner(self, name: str) -> tuple[str, str]:
        """Return the compressed weight that a name is a part of, and which part; "" for a parameter itself."""
        layer, _, kind = name.rpartition(".")
        weight = f"{layer}.weight"
        is_part = kind in (PACKED, *_SCALES) and name not in self._rows and self.compression(weight) is not None
        return (weight, kind) if is_part else (name, "")

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter in the file; float32 if it is compressed or smaller than 16 bits."""
        stored = self._tensors[self._rows[name].source]
        dtype = TORCH_DTYPES[stored.dtype] if stored.compression is None else torch.float32
        return dtype if dtype.itemsize >= 2 else torch.float32

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a parameter has in the file."""
        rows = self._rows[name]
        shape = self._tensors[rows.source].shape
        return (rows.count, *shape[1:]) if shape else ()

    @contextmanager
    def _opened(self, stored: StoredTensor, kind: str, dtype: torch.dtype) -> Iterator[Callable[[slice], Tensor]]:
        """Yield a function that returns rows of a tensor, or of the part ``kind`` of a compressed one."""
        if kind in _SCALES:
            scale = read_scale(stored, kind)
            yield lambda span: scale[span] if scale.ndim else scale
            return
        with opened(stored) as data:
            if stored.compression is None or kind == PACKED:
                yield lambda span: data[span] if data.ndim else data
            else:
                yield _decoder(stored, stored.compression, data, dtype)


def _decoder(
    stored: StoredTensor, compression: Compression, data: Tensor, dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """Return a function that decodes rows of a compressed tensor."""
    scales = {name: read_scale(stored, name) for name in compression.scales if name != "input_scale"}
    if not compression.in_rows(stored.shape):
        whole = decode(compression, data, scales, dtype).reshape(stored.shape)
        return lambda span: whole[span] if whole.ndim else whole

    def rows(span: slice) -> Tensor:
        of_rows = {name: scale[span] if scale.ndim else scale for name, scale in scales.items()}
        return decode(compression, data[span], of_rows, dtype).reshape(-1, *stored.shape[1:])

    return rows


def _unused(class_name: str) -> frozenset[str]:
    """Return the names that a class is known to have no use for."""
    found = find_architecture(class_name)
    return frozenset() if found is None else found.unused


def comfyui_rows(shapes: Mapping[str, Shape], class_name: str) -> dict[str, Rows]:
    """Return the rows of each parameter in a transformer's weights of these shapes, by ComfyUI's names.

    These are the original ones, or diffusers' own for a transformer that ComfyUI does not have.
    """
    architecture = find_architecture(class_name)
    if architecture is not None and architecture.native:
        names = {architecture.published(name) for name in shapes}
        if all(mark in names for mark in architecture.native):
            in_rows = {name: architecture.shape(name, tuple(shape)) for name, shape in shapes.items()}
            return published_rows(in_rows, class_name)
    return identity(shapes)


def published_rows(shapes: Mapping[str, Shape], class_name: str) -> dict[str, Rows]:
    """Return the rows of each parameter in tensors of these shapes, which have original names."""
    architecture = architecture_of(class_name)
    known = [name for name in shapes if architecture.knows(architecture.published(name))]
    in_file = {architecture.published(name): name for name in known if name not in architecture.unused}
    rows = converted({published: shapes[name] for published, name in in_file.items()}, architecture.to_diffusers)
    return {name: replace(each, source=in_file[each.source]) for name, each in rows.items()}


def _in_first_block(name: str) -> Iterator[str]:
    """Yield the names that a weight would have in the first entry of each list that it is in."""
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", name):
        yield f"{name[: number.start()]}0{name[number.end() :]}"


def _cut(rows: Tensor, dim: int, parts: tuple[slice, ...] | None) -> Tensor:
    """Return, of the dim ``dim``, the parts that are wanted."""
    if parts is None:
        return rows
    if len(parts) == 1:  # without a copy
        return rows.narrow(dim, parts[0].start, parts[0].stop - parts[0].start)
    return torch.cat([rows.narrow(dim, part.start, part.stop - part.start) for part in parts], dim=dim)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its dims of 1, which converters add and remove."""
    return tuple(length for length in shape if length != 1)
