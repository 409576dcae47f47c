"""What the gateway asks the supervisor."""

import socket
from typing import TypeVar

from ..errors import BackendUnavailable, ProtocolError, from_code
from ..protocol import frames
from ..protocol.deadlines import READABLE, Deadline
from ..protocol.hosts import OpenShared, OpenStore
from ..protocol.messages import Error
from .waiting import wait_for

Answer = TypeVar("Answer")


async def asked(
    supervisor: socket.socket, question: OpenStore | OpenShared, kind: type[Answer], deadline: Deadline
) -> Answer:
    """Ask, and return the answer, which is of this kind. Closes ``supervisor``.

    Raises:
        BackendError: the supervisor says why there is none.
        BackendUnavailable: it is ending.
    """
    try:
        with supervisor:
            supervisor.sendall(frames.pack(frames.Frame(message=question)))
            reader = frames.HeaderReader(supervisor)
            while (frame := reader.advance()) is None:
                await wait_for({supervisor.fileno(): READABLE}, deadline.remaining())
    except OSError as error:
        raise BackendUnavailable("the backend behind the gateway is ending") from error
    if isinstance(frame.message, Error):
        raise from_code(frame.message.code, frame.message.message)
    if not isinstance(frame.message, kind):
        raise ProtocolError(
            f"the supervisor answered {type(frame.message).__name__} where {kind.__name__} was expected"
        )
    return frame.message
