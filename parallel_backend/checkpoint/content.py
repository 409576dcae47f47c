"""A hash that identifies a model's files, on any machine and under any path."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import InvalidRequest

SAMPLES, SAMPLE = 64, 4096
"""How many parts of a file count, spread evenly, and their bytes. Weights that were trained further, or are stored in
another way, differ almost everywhere, so reading all of a file of many gigabytes would tell no more."""


def content_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of files by name, size and parts of what they hold.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, path in files:
        try:
            _add(found, name, path)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    return found.hexdigest()


def _add(found: "hashlib.blake2b", name: str, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found.update(f"{name}\0{size}\0".encode())
        last = max(0, size - SAMPLE)
        for offset in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            found.update(os.pread(file.fileno(), SAMPLE, offset))
