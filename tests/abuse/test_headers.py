"""Headers that lie, nest or name what does not exist: each is refused in a sentence, and nothing else changes."""

import dataclasses
import json
import pickle
import struct
from typing import Any

import msgspec
import pytest

from parallel_backend.client.client import Client
from parallel_backend.errors import MAX_MESSAGE
from parallel_backend.protocol import frames
from parallel_backend.protocol.messages import MAX_ID, MESSAGES

from .raw import ECHO, frame, header, refusal, tensor

DEEP = 20_000
"""Levels of JSON that no parser follows by recursion."""


def prefix(magic: bytes = frames.MAGIC, version: int = frames.VERSION, length: int = 10) -> bytes:
    return frames.PREFIX.pack(magic, version, length)


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (prefix(magic=b"pDiT"), "does not speak Parallel DiT's protocol"),
        (prefix(version=0), "the peer speaks protocol version 0"),
        (prefix(version=0xFFFF), "the peer speaks protocol version 65535"),
        (prefix(length=0), "a header of 0 bytes"),
        (prefix(length=0xFFFFFFFF), "a header of 4294967295 bytes exceeds the limit of 131072"),
        (struct.pack("!4sHQ", frames.MAGIC, frames.VERSION, 1 << 63), "a header of 2147483648 bytes exceeds the limit"),
        (pickle.dumps(list(range(100))), "does not speak Parallel DiT's protocol"),
        (frame(pickle.dumps(list(range(100)))), "a message does not decode"),
        (frame(b"PK\x03\x04" + b"archive/data.pkl" * 10), "a message does not decode"),  # as torch.save writes
    ],
    ids=["magic", "version-0", "version-65535", "empty", "4-GiB", "2-to-63", "pickle", "pickled-header", "torch.save"],
)
def test_what_is_no_header_is_refused(client: Client, sent: bytes, sentence: str) -> None:
    assert sentence in refusal(client, sent).message


@pytest.mark.parametrize(
    "sent",
    [
        b'{"type":"Done","more":' + b"[" * DEEP,
        b'{"type":"Done","more":' + b'{"a":' * DEEP,
        b'{"type":"Trial","body":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"type":"Trial","body":{"model":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}}",
        b'{"type":"Done","body":{},"tensors":[{"name":"x","more":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
        b'{"type":"Done","body":{},"more":' + b"[" * DEEP + b"]" * DEEP + b"}",
    ],
    ids=["open-lists", "open-objects", "body", "model", "tensor", "unknown-field"],
)
def test_nested_json_is_refused(client: Client, sent: bytes) -> None:
    assert len(sent) <= frames.MAX_HEADER
    assert "a message is nested too deeply" in refusal(client, frame(sent)).message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shape": [-1]}, "sizes from 0 to 274877906944"),
        ({"shape": [1] * 9}, "at most 8 sizes"),
        ({"shape": [1 << 63]}, "sizes from 0 to 274877906944"),
        ({"shape": [0, 1 << 70]}, "sizes from 0 to 274877906944"),
        ({"shape": [1 << 33, 1 << 33]}, "announces more than 256 tensors or 274877906944 bytes"),
        ({"shape": [1 << 32, 1 << 32, 4]}, "announces more than"),  # 2^64 bytes and more: 0 in 64 bits
        ({"shape": [1.5]}, "Expected `int`"),
        ({"shape": "4"}, "Expected `array`"),
        ({"dtype": "float64"}, "dtype 'float64' is not one of float32"),
        ({"dtype": "object"}, "dtype 'object' is not one of float32"),
        ({"name": ""}, "a name must have 1 to 200 printable characters"),
        ({"name": "x" * 201}, "a name must have 1 to 200 printable characters"),
        ({"name": "a\nb"}, "a name must have 1 to 200 printable characters"),
        ({"name": "a\0b"}, "a name must have 1 to 200 printable characters"),
        ({"name": "a\u202eb"}, "a name must have 1 to 200 printable characters"),
        ({"name": ["x"]}, "Expected `str`"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(client: Client, changes: dict[str, Any], sentence: str) -> None:
    answer = refusal(client, frame(header(tensors=[tensor(**changes)])))
    assert answer.code == "protocol"
    assert sentence in answer.message


def test_two_tensors_of_one_name_are_refused(client: Client) -> None:
    answer = refusal(client, frame(header(tensors=[tensor(), tensor(name="y"), tensor()])))
    assert answer.code == "protocol"
    assert "two tensors have the name 'x': each needs a name of its own" in answer.message


def test_too_many_tensors_are_refused(client: Client) -> None:
    named = [tensor(name=str(i), shape=[0]) for i in range(257)]
    assert "announces more than 256 tensors" in refusal(client, frame(header(tensors=named))).message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"request_id": ""}, "must have 1 to 64 printable characters"),
        ({"request_id": "x" * (MAX_ID + 1)}, "must have 1 to 64 printable characters"),
        ({"request_id": "a\nforged line of a log"}, "must have 1 to 64 printable characters"),
        ({"model": {"path": "a\0b"}}, "at most 4096 characters, none of them NUL"),
        ({"model": {"path": "x" * 5000}}, "at most 4096 characters, none of them NUL"),
        ({"model": {"layout": {"ulysses": 10**30}}}, "whole number of at least 1, and at most 999999999"),
        ({"model": {"layout": {"ulysses": 999999999}}}, "needs 999999999 ranks and there are 2"),
        ({"model": {"devices": {"kind": "cpu", "indices": []}}}, "names no device"),
        ({"model": {"devices": {"kind": "cpu", "indices": [0] * 65}}}, "65 devices are more than 64"),
        ({"model": {"devices": {"kind": "cpu", "indices": [-1]}}}, "the number of a device is from 0 to 1023"),
        (
            {"model": {"devices": {"kind": "cuda", "indices": [0], "visible": [["CUDA_VISIBLE_DEVICES", "0\0"]]}}},
            "has a NUL character",
        ),
        ({"make": "x"}, "Expected `int`"),
    ],
)
def test_a_request_that_cannot_be_is_refused(client: Client, changes: dict[str, Any], sentence: str) -> None:
    body = {**ECHO, **changes, "model": {**ECHO["model"], **changes.get("model", {})}}
    assert sentence in refusal(client, frame(header(body=body))).message


@pytest.mark.parametrize("kind", ["Exec", "__import__", "", "x" * 100_000, "\x01" * 20_000])
def test_an_unknown_message_is_refused(client: Client, kind: str) -> None:
    answer = refusal(client, frame(header(kind)))
    assert answer.message.startswith("unknown message")
    assert len(answer.message) <= MAX_MESSAGE


@pytest.mark.parametrize("kind", ["Continue", "Done", "Progress", "Error", "Status"])
def test_a_reply_is_not_a_request(client: Client, kind: str) -> None:
    bodies = {
        "Progress": {"phase": "x", "value": 0, "total": 1},
        "Error": {"code": "x", "message": "x" * 100_000},
        "Status": msgspec.to_builtins(client.status()),
    }
    assert refusal(client, frame(header(kind, bodies.get(kind, {})))).message == f"{kind} is not a request"


def test_an_answer_never_outgrows_a_header(client: Client) -> None:
    """The answer quotes the id, which alone fills the header that asked for it."""
    sent = b'{"type":"Outcome","body":{"request_id":"' + b"x" * (frames.MAX_HEADER - 43) + b'"}}'
    assert len(sent) == frames.MAX_HEADER
    answer = refusal(client, frame(sent))
    assert "does not know how request xxx" in answer.message
    assert len(answer.message) <= MAX_MESSAGE


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_with_a_wrong_body_is_refused(client: Client, kind: str) -> None:
    wrong: list[Any] = [None, 1, [], "x"]
    wrong += (
        [{"request_id": 1, "code": {}, "pid": "x", "phase": 0, "missing": 1}]
        if dataclasses.fields(MESSAGES[kind])
        else []
    )
    for body in wrong:
        answer = refusal(client, frame(header(kind, body)))
        assert answer.code == "protocol"
        assert "does not decode" in answer.message


def test_the_header_is_read_to_its_end_and_not_beyond(client: Client) -> None:
    """What follows a query is not taken for another one."""
    sent = frame(header("Outcome", {"request_id": "a"})) + frame(header("Stop", {}))
    assert "does not know how request a ended" in refusal(client, sent).message


def test_json_with_a_field_twice_has_one_meaning(client: Client) -> None:
    body = json.dumps(ECHO)
    sent = f'{{"type":"Trial","body":{body},"type":"Exec"}}'.encode()
    assert "unknown message 'Exec'" in refusal(client, frame(sent)).message
