"""Conversion of a diffusers folder's Mistral ``tokenizer.json`` to the format that ComfyUI reads."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ...parallel_backend.errors import InvalidRequest


def tekken_json(file: Path) -> bytes:
    """Return a tokenizer in Mistral's own format (``tekken.json``): special tokens, then the vocabulary by rank.

    Raises:
        InvalidRequest: the file is missing or is not a byte-level BPE tokenizer like Mistral's.
    """
    try:
        return json.dumps(_to_tekken(json.loads(file.read_text(encoding="utf-8")))).encode()
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(f"{file} cannot be read as Mistral's tokenizer: {error!r}") from error


def _to_tekken(tokenizer: dict[str, Any]) -> dict[str, Any]:
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    byte_of = _bytes_by_character()
    token_bytes = {
        token_id: bytes(byte_of[character] for character in token)
        for token, token_id in tokenizer["model"]["vocab"].items()
        if token_id not in special
    }
    first = len(special)
    total = first + len(token_bytes)
    if sorted(special) + sorted(token_bytes) != list(range(total)):
        raise ValueError(f"its {first} special tokens are not the first of its {total} tokens")
    vocab = [
        {"rank": token_id - first, "token_bytes": base64.b64encode(token).decode()}
        for token_id, token in sorted(token_bytes.items())
    ]
    pattern = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return {
        "config": {"pattern": pattern, "default_vocab_size": total, "default_num_special_tokens": first},
        "vocab": vocab,
        "special_tokens": [{"rank": token_id, "token_str": token} for token_id, token in sorted(special.items())],
    }


def _bytes_by_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary encodes. Printable bytes encode themselves."""
    alphabet = set(ByteLevel.alphabet())
    printable = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(alphabet - printable.keys(), key=ord)
    return printable | dict(zip(others, sorted(set(range(256)) - set(printable.values())), strict=True))
