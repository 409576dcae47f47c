"""The files in memory that recent samplings had the ranks read, by the hash of their content.

So a workflow that runs again, with another seed or strength or with several MODELs in turn, writes nothing again.
"""

from collections.abc import Callable
from pathlib import Path

from .sealed_file import SealedFile

_KEPT_SAMPLINGS = 4
"""A file that none of so many samplings used is freed."""

_files: dict[str, SealedFile] = {}
_last_use: dict[str, int] = {}
_samplings = [0]


def recent(file_id: str, make: Callable[[], SealedFile]) -> Path:
    """Return where the ranks open the file with this id. If there is none, ``make`` creates it."""
    if file_id not in _files:
        _files[file_id] = make()
    _last_use[file_id] = _samplings[0]
    return _files[file_id].path


def begin_sampling() -> None:
    """Free the files that recent samplings did not use."""
    _samplings[0] += 1
    for file_id in [each for each, used in _last_use.items() if used <= _samplings[0] - _KEPT_SAMPLINGS]:
        del _files[file_id], _last_use[file_id]
