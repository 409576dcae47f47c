"""Compressed weights in safetensors files, in the dialects that ComfyUI reads. No torch.

Each compressed layer has a weight, its scales, and a description: JSON in a tensor (``.comfy_quant``) or in the file's
metadata (``_quantization_metadata``), or, in the older dialect, the mark ``scaled_fp8`` and ``.scale_weight``. See
ComfyUI's ``comfy/quant_ops.py`` and ``convert_old_quants``.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequest
from .stored_tensor import FP8_DTYPES, PACKED_BYTES, Compression, StoredTensor

Tensors = Mapping[str, StoredTensor]

MARK = "scaled_fp8"
"""The tensor that marks files in the older dialect. It has two numbers if layers multiply in full precision only."""

_SCALE_ENDS = (".weight_scale", ".weight_scale_2", ".scale_weight")
_OTHER_ENDS = (".comfy_quant", ".input_scale", ".scale_input")
"""Ends of the names of tensors that only describe compressed weights."""

_MAX_DESCRIPTION = 1 << 16
"""Largest description of a layer in bytes."""

_TILE_ROWS, _TILE_BLOCKS = 128, 4
"""Block scales are stored in whole tiles of this size."""

_FORMATS_OF_OTHERS = {
    ".wscales": "Nunchaku's (SVDQuant or AWQ)",
    ".qweight": "Nunchaku's, GPTQ's or AWQ's",
    ".weight_proj_down": "comfy-kitchen's SVDQuant",
    ".weight_smooth_factor": "comfy-kitchen's SVDQuant",
    ".weight_zeros": "comfy-kitchen's AWQ",
    ".weight_scale_inv": "DeepSeek's (fp8 in square blocks)",
    ".SCB": "bitsandbytes'",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes'",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes'",
}
"""Ends of names that only files in formats of other projects have, and whose these are.

comfy-kitchen computes with SVDQuant and AWQ, but in another order of bytes than Nunchaku, and ComfyUI reads neither.
"""

_ANOTHER_FILE = "choose another file of the model"


def describes(name: str) -> bool:
    """Whether a tensor of this name is no weight, but says how weights are stored."""
    return name == MARK or name.endswith(_SCALE_ENDS + _OTHER_ENDS)


def mark_of_compression(tensors: Tensors) -> str | None:
    """Return the name of a tensor that only compressed weights have; None if there is none."""
    marks = (
        name
        for name, tensor in tensors.items()
        if describes(name) or name.endswith(tuple(_FORMATS_OF_OTHERS)) or tensor.dtype in PACKED_BYTES
    )
    return next(marks, None)


def with_compression(tensors: Tensors, layers: Sequence[str], prefix: str = "") -> dict[str, StoredTensor]:
    """Return the weights among tensors, each with its compression and the shape that it has once decoded.

    Args:
        tensors: by name, without the file's prefix.
        prefix: the beginning of the names in the files, which the metadata may have too.

    Raises:
        InvalidRequest: a layer's format is not known, or its weight or a scale is missing or has another shape or
            dtype.
    """
    _refuse_other_projects(tensors)
    described = _descriptions(tensors, layers, prefix)
    weights = {name: _unscaled(tensor) for name, tensor in tensors.items() if not describes(name)}
    for layer, description in described.items():
        weights[f"{layer}.weight"] = _described(layer, description, tensors)
    loose = next(
        (name for name in tensors if name.endswith(_SCALE_ENDS) and name.rpartition(".")[0] not in described), None
    )
    if loose is not None:
        raise InvalidRequest(f"{loose} belongs to no layer whose format the file names: {_ANOTHER_FILE}")
    return weights


def _refuse_other_projects(tensors: Tensors) -> None:
    for name in tensors:
        owner = next((owner for end, owner in _FORMATS_OF_OTHERS.items() if name.endswith(end)), None)
        if owner is not None:
            raise InvalidRequest(
                f"the weights are in {owner} format ({name}), which is not supported: use an fp8, INT8, NVFP4 or GGUF "
                "file of the model instead"
            )


def _unscaled(tensor: StoredTensor) -> StoredTensor:
    """Return a weight without a description: numbers of 8 bits stay as they are, too."""
    return replace(tensor, compression=Compression(format=tensor.dtype)) if tensor.dtype in FP8_DTYPES else tensor


def _descriptions(tensors: Tensors, texts: Sequence[str], prefix: str) -> dict[str, dict[str, Any]]:
    """Return what the files say about each layer, as ComfyUI's ``convert_old_quants`` understands it."""
    described: dict[str, dict[str, Any]] = {}
    if MARK in tensors and not texts:
        full_precision = math.prod(tensors[MARK].shape) == 2
        layers = [name.removesuffix(".scale_weight") for name in tensors if name.endswith(".scale_weight")]
        described |= {each: {"format": MARK, "full_precision_matrix_mult": full_precision} for each in layers}
    for name, tensor in tensors.items():
        if name.endswith(".comfy_quant"):
            described[name.removesuffix(".comfy_quant")] = _parsed(_content(tensor), name)
    for text in texts:
        layers_said = _parsed(text, "_quantization_metadata").get("layers")
        for layer, description in layers_said.items() if isinstance(layers_said, dict) else ():
            inside = layer.removeprefix(prefix)
            if f"{inside}.weight" in tensors:  # or it is another component's
                described[inside] = description if isinstance(description, dict) else {}
    return described


def _content(tensor: StoredTensor) -> bytes:
    if tensor.bytes > _MAX_DESCRIPTION:
        raise InvalidRequest(
            f"{tensor.name} has {tensor.bytes} bytes, and a layer's description has a few: {_ANOTHER_FILE}"
        )
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            return stream.read(tensor.bytes)
    except OSError as error:
        raise InvalidRequest(f"{tensor.file} cannot be read: {error}") from error


def _parsed(text: str | bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON ({error}): download the file again") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{name} is not a JSON object: {_ANOTHER_FILE}")
    return content


def _described(layer: str, description: Mapping[str, Any], tensors: Tensors) -> StoredTensor:
    """Return a layer's weight with the compression that its description says."""
    weight, stored_format = tensors.get(f"{layer}.weight"), description.get("format")
    if weight is None:
        raise InvalidRequest(f"{layer} has scales and no weight: {_ANOTHER_FILE}")
    build = _BUILDERS.get(stored_format) if isinstance(stored_format, str) else None
    if build is None:
        raise InvalidRequest(
            f"{layer} has the format {stored_format!r}, which is not supported; supported: "
            f"{', '.join(name for name in _BUILDERS if name != MARK)}"
        )
    shape, compression = build(layer, weight, description, tensors)
    input_scale = next((tensors[name] for name in _names(layer, "input") if name in tensors), None)
    if input_scale is not None:
        _check_number(input_scale)
    native = description.get("full_precision_matrix_mult") is not True
    return replace(weight, shape=shape, compression=replace(compression, input_scale=input_scale, native=native))


Built = tuple[tuple[int, ...], Compression]
"""The shape of the decoded weight, and its compression."""


def _fp8(layer: str, weight: StoredTensor, _description: Mapping[str, Any], tensors: Tensors) -> Built:
    _check_dtype(weight, FP8_DTYPES)
    return weight.shape, _scaled(Compression(format=weight.dtype), layer, weight, tensors)


def _int8(layer: str, weight: StoredTensor, description: Mapping[str, Any], tensors: Tensors) -> Built:
    _check_dtype(weight, ("I8",))
    more = description.get("params")
    said = {**(more if isinstance(more, dict) else {}), **description}
    rotation = said.get("convrot_groupsize", 256) if said.get("convrot") else 0
    if said.get("convrot") and (type(rotation) is not int or rotation not in _ROTATIONS):
        raise InvalidRequest(
            f"{layer} has rotated groups of {rotation!r} columns, and only a power of 4 is possible: {_ANOTHER_FILE}"
        )
    _check_divides(weight, weight.shape, rotation or 1)
    return weight.shape, _scaled(Compression(format="int8_tensorwise", rotation=rotation), layer, weight, tensors)


_ROTATIONS = frozenset(4**power for power in range(1, 9))
"""Sizes of Hadamard matrices by which ConvRot rotates."""


def _mxfp8(layer: str, weight: StoredTensor, _description: Mapping[str, Any], tensors: Tensors) -> Built:
    _check_dtype(weight, ("F8_E4M3",))
    block = 32
    scale = _block_scale(layer, weight, weight.shape, block, ("U8", "F8_E8M0"), tensors)
    return weight.shape, Compression(format="mxfp8", block=block, block_bytes=block, block_scale=scale)


def _nvfp4(layer: str, weight: StoredTensor, _description: Mapping[str, Any], tensors: Tensors) -> Built:
    _check_dtype(weight, ("U8",))
    shape = (*weight.shape[:-1], 2 * weight.shape[-1]) if weight.shape else ()
    block = 16
    scale = _block_scale(layer, weight, shape, block, ("U8", "F8_E4M3"), tensors)
    whole = _required(f"{layer}.weight_scale_2", tensors)
    _check_number(whole)
    compression = Compression(
        format="nvfp4", block=block, block_bytes=block // 2, tensor_scale=whole, block_scale=scale
    )
    return shape, compression


_BUILDERS: dict[str, Callable[[str, StoredTensor, Mapping[str, Any], Tensors], Built]] = {
    MARK: _fp8, "float8_e4m3fn": _fp8, "float8_e5m2": _fp8, "int8_tensorwise": _int8, "mxfp8": _mxfp8, "nvfp4": _nvfp4,
}  # fmt: skip
"""By the name of the format."""

_SCALE_DTYPES = ("F32", "F16", "BF16")
"""The dtypes that a scale of a row or of the whole tensor may have."""


def _names(layer: str, kind: str) -> tuple[str, str]:
    """Return the names of a scale in both dialects."""
    return f"{layer}.{kind}_scale", f"{layer}.scale_{kind}"


def _required(name: str, tensors: Tensors) -> StoredTensor:
    if name not in tensors:
        raise InvalidRequest(f"{name} is missing: {_ANOTHER_FILE}")
    return tensors[name]


def _scaled(compression: Compression, layer: str, weight: StoredTensor, tensors: Tensors) -> Compression:
    """Return a compression with its scale of the whole tensor or of each row."""
    new, old = _names(layer, "weight")
    scale = _required(old if new not in tensors and old in tensors else new, tensors)
    _check_dtype(scale, _SCALE_DTYPES)
    if math.prod(scale.shape) == 1:
        return replace(compression, tensor_scale=scale)
    if len(weight.shape) < 2:
        raise _wrong_shape(scale, "a single number")
    rows = weight.shape[:1]
    if scale.shape not in (rows, (*rows, 1)):
        raise _wrong_shape(scale, f"a single number or one for each of {rows[0]} rows")
    return replace(compression, row_scale=scale)


def _block_scale(
    layer: str, weight: StoredTensor, shape: tuple[int, ...], block: int, dtypes: tuple[str, ...], tensors: Tensors
) -> StoredTensor:
    _check_divides(weight, shape, block)
    scale = _required(f"{layer}.weight_scale", tensors)
    _check_dtype(scale, dtypes)
    rows, blocks = shape[0], shape[1] // block
    tiles = (-(-rows // _TILE_ROWS) * _TILE_ROWS, -(-blocks // _TILE_BLOCKS) * _TILE_BLOCKS)
    if math.prod(scale.shape) != math.prod(tiles):
        raise _wrong_shape(scale, f"{list(tiles)}, for {rows} rows of {blocks} blocks")
    return scale


def _check_divides(weight: StoredTensor, shape: tuple[int, ...], block: int) -> None:
    if len(shape) != 2 or shape[1] % block:
        needed = f"rows of whole blocks of {block} numbers" if len(shape) == 2 else "a matrix"
        raise InvalidRequest(f"{weight.name} has shape {list(shape)}, and its format needs {needed}: {_ANOTHER_FILE}")


def _check_number(scale: StoredTensor) -> None:
    if math.prod(scale.shape) != 1:
        raise _wrong_shape(scale, "a single number")
    _check_dtype(scale, _SCALE_DTYPES)


def _check_dtype(tensor: StoredTensor, dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise InvalidRequest(
            f"{tensor.name} has dtype {tensor.dtype}, and its format needs {' or '.join(dtypes)}: {_ANOTHER_FILE}"
        )


def _wrong_shape(scale: StoredTensor, needed: str) -> InvalidRequest:
    return InvalidRequest(f"{scale.name} has shape {list(scale.shape)}, and its format needs {needed}: {_ANOTHER_FILE}")
