"""Receives the files that a client on another machine sends with its request."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

from ...errors import ProtocolError
from ...protocol import frames
from ...protocol.deadlines import Deadline
from ...protocol.messages import Files
from ...protocol.tensors import recv_into


def receive_files(
    connection: socket.socket,
    wanted: tuple[str, ...],
    room: Callable[[str, int], AbstractContextManager[memoryview]],
    *,
    deadline: Deadline,
    poll: Callable[[], None],
) -> None:
    """Receive files into memory that other processes of this host can read.

    Args:
        connection: the client's.
        wanted: ids of the files.
        room: yields memory for a file, by its id and size.
        deadline: starts over with each part that arrives.
        poll: called meanwhile.

    Raises:
        ProtocolError: the client sends other files.
        InvalidRequest: a file does not fit into memory.
        DeadlineExceeded, ConnectionError: see ``recv_tensors``.
    """
    frame = frames.recv_header(connection, deadline=deadline, poll=poll)
    names = tuple(meta.name for meta in frame.tensors)
    if not isinstance(frame.message, Files) or names != wanted:
        raise ProtocolError(
            f"the client sent {type(frame.message).__name__} {names} where files {wanted} were expected"
        )
    for meta in frame.tensors:
        with room(meta.name, meta.nbytes) as content:
            recv_into(connection, content, deadline=deadline, poll=poll)
