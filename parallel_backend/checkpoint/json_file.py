"""The JSON files of a model folder, which come from elsewhere."""

import json
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest

MAX_BYTES = 64 << 20
"""Largest JSON file in bytes. Indices of weights, the largest of these files, have less than 1 MB."""


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        InvalidRequest: it cannot be read, is no regular file (a link may lead to a device, which has no end), is too
            large, or holds something else. The message quotes nothing of it.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, and {MAX_BYTES} is the limit")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file} does not contain a JSON object")
    return content
