"""Receives the files that a client on another machine sends with its request."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import ProtocolError
from ...protocol import frames
from ...protocol.deadlines import Deadline
from ...protocol.messages import Files
from ...protocol.tensors import recv_into

if TYPE_CHECKING:
    from ...engine.engine import Engine


def receive_files(
    connection: socket.socket,
    wanted: tuple[str, ...],
    engine: "Engine",
    *,
    deadline: Deadline,
    poll: Callable[[], None],
) -> None:
    """Receive files into memory that other processes of this host can read.

    Args:
        connection: the client's.
        wanted: ids of the files.
        engine: keeps them.
        deadline: starts over with each part that arrives.
        poll: called meanwhile.

    Raises:
        ProtocolError: the client sends others.
        InvalidRequest: one does not fit into memory.
        DeadlineExceeded, ConnectionError: see ``recv_tensors``.
    """
    frame = frames.recv_header(connection, deadline=deadline, poll=poll)
    names = tuple(meta.name for meta in frame.tensors)
    if not isinstance(frame.message, Files) or names != wanted:
        raise ProtocolError(
            f"the client sent {type(frame.message).__name__} {names} where files {wanted} were expected"
        )
    for meta in frame.tensors:
        with engine.receiving_file(meta.name, meta.nbytes) as content:
            recv_into(connection, content, deadline=deadline, poll=poll)
