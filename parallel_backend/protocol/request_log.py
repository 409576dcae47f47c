"""The log of requests: a JSON object a line, without prompts and without the values of tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        time: when it arrived, in ISO 8601.
        id: the request's.
        kind: of the message.
        model: name of its folder or file.
        layout: ``ParallelLayout`` as text; "" for requests without a denoiser where the model names none.
        size: shape of the latent, of the pixels that are encoded, or of the token ids; empty if there is none.
        steps: requested steps of a step loop, or answered ones of ComfyUI's; 0 for requests without steps.
        seconds: by phase: ``queued`` behind other requests, ``starting`` ranks, ``running`` in total, and its parts on
            rank 0: ``receiving`` tensors, ``preparing``, ``connecting``, ``loading``, ``sampling``, ``denoising``,
            ``decoding``, ``encoding``, ``client`` (sending progress) and ``replying``.
        received: bytes of the client's tensors that arrived.
        sent: bytes of tensors to the client.
        outcome: ``"done"`` or a code of ``errors``.
    """

    time: str
    id: str
    kind: str
    model: str
    layout: str
    size: tuple[int, ...]
    steps: int
    seconds: Mapping[str, float]
    received: int
    sent: int
    outcome: str


def encode(line: RequestLine) -> str:
    """A line's text, without the line break."""
    return msgspec.json.encode(line).decode()


def decode(text: str | bytes) -> RequestLine:
    """The line of a text.

    Raises:
        msgspec.DecodeError: the text is not a line of the log.
    """
    return msgspec.json.decode(text, type=RequestLine)


def read(path: Path) -> Iterator[RequestLine]:
    """Yield the lines of a log, with the older file's lines first. Incomplete lines are skipped.

    Raises:
        OSError: a file cannot be read.
    """
    for file in (path.with_name(f"{path.name}.1"), path):
        if not file.exists():
            continue
        for text in file.read_bytes().splitlines():
            try:
                yield decode(text)
            except msgspec.DecodeError:
                continue
