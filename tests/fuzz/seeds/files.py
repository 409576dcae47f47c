"""Inputs of the targets ``safetensors``, ``gguf`` and ``changes``: good files, and one for each refusal."""

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from parallel_backend.checkpoint import adapter_file, overlay_file

from ..targets import FILE_ID

Seeds = dict[str, bytes]
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "F8_E8M0": 1, "I64": 8, "I32": 4}


def safetensors(tensors: Mapping[str, Any], metadata: Any = None) -> bytes:
    """Return a file. A tensor is its dtype and shape, or the bytes of a vector of bytes."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, said in tensors.items():
        dtype, shape = ("U8", (len(said),)) if isinstance(said, bytes) else said
        content = said if isinstance(said, bytes) else bytes(SIZES[dtype] * int(np.prod(shape, dtype=np.int64)))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return from_entries(entries, data)


def from_entries(entries: Any, data: bytes = b"") -> bytes:
    """Return a file whose header holds this."""
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def _entry(**changes: Any) -> bytes:
    return from_entries({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}, bytes(4))


def _layer(weight: Any, description: Any, **scales: Any) -> bytes:
    """Return a file with a layer ``a`` that a description is about."""
    tensors = {"a.weight": weight} if weight else {}
    said = description if isinstance(description, bytes) else json.dumps(description).encode()
    return safetensors(tensors | {f"a.{name}": each for name, each in scales.items()} | {"a.comfy_quant": said})


F32 = ("F32", ())
FP8 = {"format": "float8_e4m3fn"}
LAYERS = {
    "fp8": _layer(("F8_E4M3", (4, 2)), FP8, weight_scale=F32, input_scale=F32),
    "fp8_rows": _layer(("F8_E4M3", (4, 2)), FP8, weight_scale=("F32", (4,))),
    "int8": _layer(("I8", (2, 16)), {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
                   weight_scale=("F32", (2, 1))),
    "mxfp8": _layer(("F8_E4M3", (2, 32)), {"format": "mxfp8"}, weight_scale=("F8_E8M0", (128, 4))),
    "nvfp4": _layer(("U8", (2, 8)), {"format": "nvfp4"}, weight_scale=("F8_E4M3", (128, 4)), weight_scale_2=F32),
}  # fmt: skip
"""A file of each format of compressed weights."""


def _quantised_refusals() -> Seeds:
    weight, scale = ("F8_E4M3", (4, 2)), {"weight_scale": F32}
    turned = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 3}
    metadata = {"_quantization_metadata": "["}
    return {
        "other_project": safetensors({"a.qweight": ("F32", (1,))}),
        "loose_scale": safetensors({"a.weight": weight, **{f"a.{name}": each for name, each in scale.items()}}),
        "no_weight": _layer(None, FP8, **scale), "no_format": _layer(weight, {"format": []}, **scale),
        "no_json": _layer(weight, b"{", **scale), "no_object": _layer(weight, b"[]", **scale),
        "nested_json": _layer(weight, b"[" * 1200, **scale), "long_json": _layer(weight, bytes((1 << 16) + 1), **scale),
        "bad_metadata": safetensors({"a.weight": weight}, metadata), "weight_dtype": _layer(F32, FP8, **scale),
        "rotation": _layer(("I8", (2, 16)), turned, **scale), "no_scale": _layer(weight, FP8),
        "scale_shape": _layer(weight, FP8, weight_scale=("F32", (3,))),
        "vector": _layer(("F8_E4M3", (4,)), FP8, weight_scale=("F32", (4,))),
        "scale_dtype": _layer(weight, FP8, weight_scale=("I64", ())),
        "input_shape": _layer(weight, FP8, **scale, input_scale=("F32", (2,))),
        "tiles": _layer(("F8_E4M3", (2, 32)), {"format": "mxfp8"}, weight_scale=("F8_E8M0", (4,))),
        "columns": _layer(("F8_E4M3", (2, 31)), {"format": "mxfp8"}, weight_scale=("F8_E8M0", (128, 4))),
    }  # fmt: skip


def _safetensors_refusals() -> Seeds:
    two = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return _quantised_refusals() | {
        "empty": b"", "length": struct.pack("<Q", 1 << 63) + b"{}", "beyond": struct.pack("<Q", 3) + b"{}",
        "no_json_header": struct.pack("<Q", 1) + b"{", "not_utf8": struct.pack("<Q", 1) + b"\xff",
        "nested": struct.pack("<Q", 1200) + b"[" * 1200, "list": from_entries([]), "no_entry": from_entries({"a": 1}),
        "no_dtype": from_entries({"a": {"shape": []}}), "dtype": _entry(dtype=1), "shape": _entry(shape=[-1]),
        "float": _entry(shape=[1.0]), "digits": _entry(shape=[10**4000, 10**4000]), "dims": _entry(shape=[1] * 9),
        "offsets": _entry(data_offsets=[0]), "rows": _entry(shape=[0, 5]), "bytes": _entry(shape=[2]),
        "long": _entry(data_offsets=[0, 1 << 63]), "backwards": _entry(dtype="I32", data_offsets=[4, 0]),
        "gap": _entry(dtype="I32", data_offsets=[1, 4]), "overlap": from_entries({"a": two, "b": two}, bytes(4)),
        "short": from_entries({"a": two}, bytes(3)), "more": from_entries({"a": two}, bytes(5)),
    }  # fmt: skip


# GGUF

Field = Callable[[gguf.GGUFWriter], None]


def _no_field(writer: gguf.GGUFWriter) -> None:
    """Most files have no field of their own."""


def gguf_file(*fields: Field, kind: str = "F32", architecture: str = "wan") -> bytes:
    """Return a file with fields, a vector ``a`` and, unless ``kind`` is plain, a matrix ``b`` of that type."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for write in fields:
            write(writer)
        writer.add_tensor("a", np.zeros(12, np.float32))
        if kind != "F32":
            type_ = gguf.GGMLQuantizationType[kind]
            _block, size = gguf.GGML_QUANT_SIZES[type_]
            writer.add_tensor("b", np.zeros((2, size), np.uint8), raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _shape(*shape: int) -> Field:
    return lambda writer: writer.add_array("comfy.gguf.orig_shape.a", list(shape))


def _changed(content: bytes, mark: bytes, after: int, value: bytes) -> bytes:
    """Return a file with other bytes, so many bytes after the end of the first ``mark``."""
    at = content.index(mark) + len(mark) + after
    return content[:at] + value + content[at + len(value) :]


def _array(kind: int, count: int, file: bytes | None = None) -> bytes:
    """Return a file whose array claims a type and so many values."""
    content = file or gguf_file(lambda writer: writer.add_array("long", [1]))
    return _changed(content, b"long", 4, struct.pack("<IQ", kind, count))


def _gguf_refusals() -> Seeds:
    good, block = gguf_file(), gguf_file(kind="Q4_0")
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 1)  # name and number of dims of the vector
    texts = gguf_file(lambda writer: writer.add_array("long", ["a", "b"]))
    number = gguf.GGUFValueType
    return {
        "empty": b"", "magic": b"GGML" + good[4:], "version": good[:4] + struct.pack("<I", 1) + good[8:],
        "swapped": good[:4] + struct.pack(">I", 3) + good[8:], "cut_off": good[:-20], "header_cut_off": good[:40],
        "tensors": good[:8] + struct.pack("<Q", 1 << 60) + good[16:],
        "fields": good[:16] + struct.pack("<Q", 1 << 40) + good[24:],
        "name": good[:24] + struct.pack("<Q", 1 << 62) + good[32:], "values": _array(number.UINT8, 1 << 23),
        "long_array": _array(number.UINT8, 1 << 20), "texts": _array(number.STRING, 1 << 20, texts),
        "text": _changed(texts, b"long", 16, struct.pack("<Q", 1 << 40)), "nested": _array(number.ARRAY, 1),
        "unknown_type": _array(99, 1), "dims": _changed(good, entry[:-4], 0, struct.pack("<I", 9)),
        "size": _changed(good, entry, 0, struct.pack("<Q", 1 << 61)), "no_size": _changed(good, entry, 0, bytes(8)),
        "type": _changed(good, entry, 8, struct.pack("<I", 999)),
        "unsupported": gguf_file(kind="IQ2_XXS"), "block": _changed(block, b"b" + struct.pack("<I", 2), 0, bytes([31])),
        "offset": _changed(good, entry, 12, struct.pack("<Q", 1 << 50)),
        "overlap": _changed(block, struct.pack("<Q", 1) + b"b" + struct.pack("<I", 2), 20, bytes(8)),
        "other_shape": gguf_file(_shape(4, 5)), "negative_shape": gguf_file(_shape(-3, -4)),
        "no_shape": gguf_file(lambda writer: writer.add_string("comfy.gguf.orig_shape.a", "x")),
        "alignment": gguf_file(lambda writer: writer.add_uint32("general.alignment", 3)),
    }  # fmt: skip


# Files of ComfyUI's process


def _metadata(**changes: Any) -> bytes:
    layer = adapter_file.AdapterLayer(weight="a", start=0, scale=0.5)
    metadata = adapter_file.metadata([layer], {"a": [2, 3]}, FILE_ID) | changes
    texts = {name: text for name, text in metadata.items() if text is not None}
    return safetensors({"0.up": ("F32", (2, 1)), "0.down": ("F32", (1, 3)), "transformer.a": ("F32", (1,))}, texts)


def accepted() -> dict[str, Seeds]:
    """Return inputs that are accepted, by target and name."""
    plain = safetensors({"a": ("BF16", (2, 3)), "b": ("F32", ()), "c": ("I32", (0,))}, {"modelspec": "x"})
    marked = safetensors({"scaled_fp8": ("F8_E4M3", (2,)), "a.weight": ("F8_E4M3", (4, 2)), "a.scale_weight": F32})
    said = {"_quantization_metadata": json.dumps({"layers": {"a": FP8, "b": FP8}})}
    by_metadata = safetensors({"a.weight": ("F8_E4M3", (4, 2)), "a.weight_scale": F32}, said)
    arrays = gguf_file(lambda writer: writer.add_array("long", [1, 2]), lambda writer: writer.add_array("words", ["a"]))
    return {
        "safetensors": {
            "plain": plain,
            "nothing": from_entries({}),
            "marked": marked,
            "metadata": by_metadata,
            **LAYERS,
        },
        "gguf": {
            "plain": gguf_file(),
            "blocks": gguf_file(kind="Q4_0"),
            "shape": gguf_file(_shape(3, 4)),
            "arrays": arrays,
            "aligned": gguf_file(lambda writer: writer.add_custom_alignment(64)),
        },
        "changes": {"adapter": _metadata()},
    }


def refused() -> dict[str, Seeds]:
    """Return inputs that are refused, by target and what is wrong with them."""
    overlay = safetensors({"transformer.a": ("F32", (1,))}, overlay_file.metadata({"a": [1]}, FILE_ID))
    return {
        "safetensors": _safetensors_refusals(),
        "gguf": _gguf_refusals(),
        "changes": {
            "no_file": b"x",
            "id": _metadata(id="another"),
            "no_layers": _metadata(layers=None),
            "overlay": overlay,
            "layers": _metadata(layers='[{"weight":1}]'),
            "shapes": _metadata(shapes='{"a":[1.5]}'),
            "no_json": _metadata(shapes="{"),
            "nested": _metadata(shapes="[" * 1200),
            "list": _metadata(shapes="[]"),
        },
    }
