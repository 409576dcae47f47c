"""Sends files that exist only in this process's memory to a backend on another machine."""

import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from ...errors import InvalidRequest, ProtocolError
from ...protocol import frames
from ...protocol.deadlines import Deadline, send_all
from ...protocol.messages import Files


def send_files(
    sock: socket.socket,
    wanted: Sequence[str],
    paths: Mapping[str, str],
    *,
    deadline: Deadline,
    poll: Callable[[], None],
) -> None:
    """Send the files that rank 0 asks for.

    Args:
        sock: the connection.
        wanted: their ids.
        paths: of the request's files, by id.
        deadline: starts over with each part that the peer takes.
        poll: called meanwhile.

    Raises:
        ProtocolError: rank 0 asks for a file that is not among them.
        InvalidRequest: a file no longer exists.
        DeadlineExceeded, ConnectionError: see ``send_all``.
    """
    unknown = [each for each in wanted if each not in paths]
    if unknown:
        raise ProtocolError(f"the backend asks for files {unknown}, which the request does not name")
    try:
        metas = [frames.TensorMeta(name=each, dtype="uint8", shape=(os.stat(paths[each]).st_size,)) for each in wanted]
        send_all(sock, frames.pack(frames.Frame(message=Files(), tensors=tuple(metas))), deadline=deadline, poll=poll)
        for each in wanted:
            with (
                open(paths[each], "rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content,
                memoryview(content) as view,
            ):
                send_all(sock, view, deadline=deadline, poll=poll)
    except ConnectionError:
        raise
    except OSError as error:
        raise InvalidRequest(f"a file in this process's memory is gone: run the workflow again ({error})") from error
