"""Settings that the user has chosen in ComfyUI's page: a file with a text for each variable of ``env``.

The environment goes before them. The file is read again when it has changed, so that a running backend notices.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import InvalidRequest

MAX_FILE = 64 << 10
"""Bytes of the file."""

_read: dict[Path, tuple[tuple[int, int, int], Mapping[str, str]]] = {}
"""What the files held at which inode, time and size."""


def texts(file: Path) -> Mapping[str, str]:
    """Return the texts in a file; none if there is no file.

    Raises:
        InvalidRequest: the file cannot be read.
    """
    try:
        now = file.stat()
    except OSError:
        return {}
    state = (now.st_ino, now.st_mtime_ns, now.st_size)
    known = _read.get(file)
    if known is None or known[0] != state:
        known = _read[file] = (state, _parsed(file))
    return known[1]


def save(file: Path, changes: Mapping[str, str]) -> None:
    """Write texts into a file; an empty one takes a variable out.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    left = {name: text for name, text in {**texts(file), **changes}.items() if text}
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps(left, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise InvalidRequest(f"the settings cannot be saved in {file}: {error.strerror}") from error


def _parsed(file: Path) -> Mapping[str, str]:
    try:
        data = file.read_bytes()[:MAX_FILE]
        found = json.loads(data) if data.strip() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the settings in {file} cannot be read: remove the file") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InvalidRequest(f"the settings in {file} are no texts by name: remove the file")
    return found
