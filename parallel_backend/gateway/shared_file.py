"""Sends files of models, which rank 0 shares, to hosts that lack them."""

import asyncio
import logging
import socket
import threading
from pathlib import Path
from typing import BinaryIO

from ..errors import BackendUnavailable
from ..protocol.deadlines import Deadline
from ..protocol.greeting import Goal
from ..protocol.hosts import OpenShared, SharedPath
from ..protocol.shared_file import PIECE, digest_of
from .questions import asked

log = logging.getLogger(__name__)

STALLED = 60.0
"""Seconds that the other host has to take a piece."""


async def file_of(supervisor: socket.socket, goal: Goal, deadline: Deadline) -> socket.socket:
    """Ask the supervisor where a file is, and return a socket that gives what follows an offset. Closes ``supervisor``.

    Raises:
        BackendError: the file is not shared now, or cannot be read.
    """
    question = OpenShared(generation=goal.generation, file=goal.file)
    path = Path((await asked(supervisor, question, SharedPath, deadline)).path)
    try:
        file = await asyncio.wait_for(asyncio.to_thread(_opened, path, goal.offset), deadline.remaining())
    except asyncio.TimeoutError as error:
        raise BackendUnavailable(f"the first host's disk does not open {path.name} in time") from error
    except (OSError, OverflowError) as error:
        raise BackendUnavailable(f"the first host cannot read {path.name} from byte {goal.offset}: {error}") from error
    ours, theirs = socket.socketpair()
    theirs.settimeout(STALLED)
    threading.Thread(target=_feed, args=(file, theirs), name=f"sending {path.name}", daemon=True).start()
    return ours


def _opened(path: Path, offset: int) -> BinaryIO:
    file = path.open("rb")
    try:
        file.seek(offset)
    except BaseException:
        file.close()
        raise
    return file


def _feed(file: BinaryIO, sock: socket.socket) -> None:
    with file, sock:
        try:
            while piece := file.read(PIECE):
                sock.sendall(piece)
                sock.sendall(digest_of(piece))
        except OSError as error:
            log.warning("%s is not sent to its end: %s", Path(file.name).name, error)
