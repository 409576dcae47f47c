"""A Mistral tokenizer as ComfyUI wants it, made from a diffusers folder's ``tokenizer.json``."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ...parallel_backend.errors import InvalidRequest


def tekken(file: Path) -> bytes:
    """The vocabulary in Mistral's own format (``tekken.json``): special tokens first, then the rest by rank.

    Raises:
        InvalidRequest: the file is missing or is no tokenizer of this kind.
    """
    try:
        return json.dumps(_converted(json.loads(file.read_text(encoding="utf-8")))).encode()
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{file} cannot be read as Mistral's tokenizer: {error!r}") from error


def _converted(content: dict[str, Any]) -> dict[str, Any]:
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    byte_of = _bytes()
    words = {
        number: bytes(byte_of[character] for character in piece)
        for piece, number in content["model"]["vocab"].items()
        if number not in special
    }
    first = len(special)
    if sorted(special) + sorted(words) != list(range(first + len(words))):
        raise ValueError(f"its {first} special tokens are not the first of its {first + len(words)} tokens")
    vocab = [
        {"rank": number - first, "token_bytes": base64.b64encode(word).decode()}
        for number, word in sorted(words.items())
    ]
    pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return {
        "config": {"pattern": pattern, "default_vocab_size": first + len(words)},
        "vocab": vocab,
        "special_tokens": [{"rank": number, "token_str": name} for number, name in sorted(special.items())],
    }


def _bytes() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: those that print stand for themselves."""
    alphabet = set(ByteLevel.alphabet())
    own = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(alphabet - own.keys(), key=ord)
    return own | dict(zip(others, sorted(set(range(256)) - set(own.values())), strict=True))
