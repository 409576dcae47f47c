"""Files and folders that only this user can read."""

import os
import stat
from pathlib import Path
from typing import IO

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def append_to(path: Path) -> IO[bytes]:
    """Open a file at its end, and make it and its folder if they are not there.

    Raises:
        OSError: it cannot be opened, or it is a link.
    """
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return open(path, "ab", opener=opener)


def opener(path: str, flags: int) -> int:
    """The ``opener`` of ``open`` for such a file."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def is_private(info: os.stat_result) -> bool:
    """Whether this is the ``lstat`` of a folder that this user owns and nobody else can enter."""
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
