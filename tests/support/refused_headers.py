"""Headers that break one limit each, and the sentence that refuses it.

Unit tests decode them, tests of abuse send them to a backend, and the fuzzer begins with them.
"""

import json
from typing import Any

from parallel_backend.protocol.frames import MAGIC, PREFIX, VERSION

Refused = dict[str, tuple[bytes, str]]

DIGEST = "a digest must have at most 64 ASCII characters"
NAME = "a name must have 1 to 200 printable characters"
SIZES = "sizes from 0 to 274877906944"
TOTAL = "announces more than 256 tensors or 274877906944 bytes"
ID = "must have 1 to 64 printable characters"
PATH = "at most 4096 characters, none of them NUL"
DEGREE = "whole number of at least 1, and at most 999999999"
NO_JSON, NESTED = "a message does not decode", "a message is nested too deeply"
TENSOR = {"name": "x", "dtype": "float32", "shape": [1]}
MODEL = {"path": "/m", "devices": {"kind": "cpu", "indices": [0, 1]}}
HOST = {"name": "b", "node": 1, "address": "10.0.0.2", "devices": MODEL["devices"]}


def header(kind: str = "Done", body: Any = None, tensors: Any = ()) -> bytes:
    """Return a header without its prefix."""
    return json.dumps({"type": kind, "body": body or {}, "tensors": tensors}).encode()


def _tensor(**changes: Any) -> bytes:
    return header(tensors=[TENSOR | changes])


def _model(**changes: Any) -> bytes:
    return header("Trial", {"name": "exchange", "model": MODEL | changes, "request_id": "a"})


def _devices(**changes: Any) -> bytes:
    return _model(devices={"kind": "cpu", "indices": [0, 1]} | changes)


def _layout(**degrees: Any) -> bytes:
    return _model(layout=degrees)


def _id(text: str) -> bytes:
    return header("Trial", {"name": "exchange", "model": MODEL, "request_id": text})


def _origin(**parts: Any) -> bytes:
    return header("Trial", {"name": "exchange", "model": MODEL, "request_id": "a", "origin": {"prompt": "p"} | parts})


def _text(**parts: Any) -> bytes:
    return header("EncodeText", {"model": MODEL} | parts)


def _host(**changes: Any) -> bytes:
    return header("JoinHost", {"host": HOST | changes})


_SHAPES: Refused = {
    "negative": (_tensor(shape=[-1]), SIZES),
    "nine_dims": (_tensor(shape=[1] * 9), "at most 8 sizes"),
    "size_2_to_63": (_tensor(shape=[1 << 63]), SIZES),
    "size_behind_0": (_tensor(shape=[0, 1 << 70]), SIZES),
    "bytes": (_tensor(shape=[1 << 37, 2]), TOTAL),
    "bytes_2_to_64": (_tensor(shape=[1 << 32, 1 << 32, 4]), TOTAL),  # 0 in 64 bits
    "fraction": (_tensor(shape=[1.5]), "Expected `int`"),
    "no_list": (_tensor(shape="4"), "Expected `array`"),
    "too_many": (header(tensors=[TENSOR | {"name": str(i), "shape": [0]} for i in range(257)]), TOTAL),
}
_NAMES: Refused = {
    "dtype": (_tensor(dtype="float64"), "dtype 'float64' is not one of float32"),
    "no_dtype": (_tensor(dtype="object"), "dtype 'object' is not one of float32"),
    "no_name": (_tensor(name=""), NAME),
    "long_name": (_tensor(name="x" * 201), NAME),
    "name": (_tensor(name="a\n"), NAME),
    "name_with_nul": (_tensor(name="a\0b"), NAME),
    "name_right_to_left": (_tensor(name="a\u202eb"), NAME),
    "name_list": (_tensor(name=["x"]), "Expected `str`"),
    "twice": (header(tensors=[TENSOR] * 2), "two tensors have the name 'x': each needs a name of its own"),
    "digest": (_tensor(digest="\u202e"), DIGEST),
    "long_digest": (_tensor(digest="a" * 65), DIGEST),
    "same_as_nothing": (_tensor(same="y"), "tensor 'x' cannot equal 'y': name an earlier one of its shape"),
    "same_as_another": (header(tensors=[TENSOR, TENSOR | {"name": "y", "shape": [2], "same": "x"}]), "cannot equal"),
    "no_id": (_id(""), ID),
    "long_id": (_id("x" * 65), ID),
    "id": (_id("a\n"), ID),
    "long_prompt": (_origin(prompt="x" * 257), "must have at most 256 printable characters"),
    "node": (_origin(node="a\n"), "must have at most 256 printable characters"),
}
_JSON: Refused = {
    "no_json": (b"{", NO_JSON),
    "not_utf8": (b'{"type":"\xff"}', NO_JSON),
    "archive": (b"PK\x03\x04" + b"archive/data.pkl" * 10, NO_JSON),  # as torch.save writes
    "nested": (b'{"a":' + b"[" * 1200, NESTED),
    "nested_objects": (b'{"type":"Done","more":' + b'{"a":' * 1200, NESTED),
    "nested_body": (b'{"type":"Trial","body":{"model":' + b"[" * 1200 + b"]" * 1200 + b"}}", NESTED),
    "nested_tensor": (b'{"type":"Done","tensors":[{"name":"x","more":' + b"[" * 1200 + b"]" * 1200 + b"}]}", NESTED),
    "unknown": (header("Exec"), "unknown message 'Exec'"),
    "type_twice": (b'{"type":"Done","body":{},"type":"Exec"}', "unknown message 'Exec'"),
    "body": (header("Cancel", {"request_id": 1}), "Expected `str`"),
    "number": (header("Trial", {"name": "exchange", "model": MODEL, "amount": "x"}), "Expected `int`"),
}
_MODELS: Refused = {
    "path": (_model(path="a\0"), PATH),
    "long_path": (_model(path="x" * 5000), PATH),
    "adapter": (_text(adapters=[{"path": "a\0", "id": "a", "strength": 1.0}]), PATH),
    "overlay": (_text(overlay={"path": "a\0", "id": "a"}), PATH),
    "step_cache": (header("Forward", {"model": MODEL, "branches": 1, "cache": {"interval": 0}}), "1 to 16 works"),
    "step_cache_threshold": (
        header("Forward", {"model": MODEL, "branches": 1, "cache": {"interval": 2, "threshold": -1.0}}),
        "step cache threshold=-1.0",
    ),
    "many_devices": (_devices(indices=[0] * 65), "65 devices are more than 64"),
    "device": (_devices(indices=[-1]), "the number of a device is from 0 to 1023"),
    "hosts": (_devices(hosts=["", "b", "b"]), "the devices need one host each"),
    "first_host": (_devices(hosts=["b", ""]), "the first device has to be on the first host"),
    "visible": (_devices(kind="cuda", visible=[["CUDA_VISIBLE_DEVICES", "\0"]]), "has a NUL character"),
    "host_name": (_host(name="a b"), "must have 1 to 64 letters"),
    "host_number": (_host(node=0), "its number must be 1 or more"),
}
_LAYOUTS: Refused = {
    "degree": (_layout(ulysses=0), DEGREE),
    "large_degree": (_layout(ulysses=10**12), DEGREE),
    "degree_beyond_64_bits": (_layout(ulysses=10**30), DEGREE),
    "warmup": (_layout(warmup=-1), "must be a whole number of at least 0"),
    "stale": (_layout(stale="x"), "leave it out to stay exact"),
    "speed": (_layout(pipe=2, balance=[0.0, 1.0]), "balance"),
    "combination": (_layout(shard_weights=True), "shares the weights among the ranks that split tokens"),
    "balance": (_layout(cfg=2, balance=[1.0, 2.0]), "leave it out, or raise ulysses"),
    "speeds": (_layout(pipe=2, balance=[1.0]), "balance"),
    "speeds_of_heads": (_layout(ring=2, balance=[2.0, 1.0], attention_balance=[2.0, 1.0]), "leave out what follows"),
}
HEADERS: Refused = _JSON | _SHAPES | _NAMES | _MODELS | _LAYOUTS
"""Headers that do not decode."""
REQUESTS: Refused = {
    "no_device": (_devices(indices=[]), "names no device"),
    "ranks": (_layout(cfg=3), "needs 3 ranks and there are 2"),
    "many_ranks": (_layout(ulysses=999999999), "needs 999999999 ranks and there are 2"),
}
"""Headers that decode, and that the supervisor refuses."""
PREFIXES: Refused = {
    "magic": (b"pDiT" + bytes(6), "does not speak Parallel DiT's protocol"),
    "version": (PREFIX.pack(MAGIC, 1, 9), "the peer speaks protocol version 1"),
    "large_version": (PREFIX.pack(MAGIC, 0xFFFF, 9), "the peer speaks protocol version 65535"),
    "length": (PREFIX.pack(MAGIC, VERSION, (1 << 32) - 1), "a header of 4294967295 bytes exceeds the limit of 131072"),
    "no_length": (PREFIX.pack(MAGIC, VERSION, 0), "a header of 0 bytes"),
}
