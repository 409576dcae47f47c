"""Headers that lie, nest or name what does not exist: each is refused in a sentence, and nothing else changes."""

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from parallel_backend.client.client import Client
from parallel_backend.errors import MAX_MESSAGE
from parallel_backend.protocol import frames
from parallel_backend.protocol.fingerprint import fingerprint
from parallel_backend.protocol.messages import MESSAGES
from tests.support.refused_headers import HEADERS, PREFIXES, REQUESTS

from .raw import frame, header, refusal

DEEP = 20_000
"""Levels of JSON that no parser follows by recursion."""


@pytest.mark.parametrize(("sent", "sentence"), PREFIXES.values(), ids=PREFIXES)
def test_what_is_no_header_is_refused(client: Client, sent: bytes, sentence: str) -> None:
    assert sentence in refusal(client, sent).message


def test_a_header_that_cannot_be_is_refused(client: Client) -> None:
    for name, (sent, sentence) in HEADERS.items():
        answer = refusal(client, frame(sent))
        assert answer.code == "protocol", name
        assert sentence in answer.message, name


def test_a_request_that_cannot_be_is_refused(client: Client) -> None:
    for name, (sent, sentence) in REQUESTS.items():
        ours = json.dumps(json.loads(sent) | {"program": fingerprint()}).encode()
        assert sentence in refusal(client, frame(ours)).message, name


@pytest.mark.parametrize("sent", [b"[" * DEEP, b'{"a":' * DEEP], ids=["lists", "objects"])
def test_nested_json_is_refused(client: Client, sent: bytes) -> None:
    nested = b'{"type":"Trial","body":' + sent
    assert len(nested) <= frames.MAX_HEADER
    assert "a message is nested too deeply" in refusal(client, frame(nested)).message


@pytest.mark.parametrize("kind", ["", "x" * 100_000, "\x01" * 20_000])
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
        [{"request_id": 1, "code": {}, "pid": "x", "phase": 0, "missing": 1, "open": 1}]
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
