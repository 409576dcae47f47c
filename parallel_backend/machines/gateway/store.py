"""Connects ranks on other hosts to the store, which listens only on this host's loopback interface."""

import asyncio
import socket

from ...errors import BackendUnavailable, ProtocolError, from_code
from ...protocol import frames
from ...protocol.deadlines import READABLE, Deadline
from ...protocol.hosts import OpenStore, StorePort
from ...protocol.messages import Error
from .waiting import wait_for


async def store_of(supervisor: socket.socket, generation: int, deadline: Deadline) -> socket.socket:
    """Ask the supervisor where the store of a set of ranks is, and connect to it. Closes ``supervisor``.

    Raises:
        BackendError: the set has ended, or the store does not answer.
    """
    port = await _port(supervisor, generation, deadline)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connecting = asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await asyncio.wait_for(connecting, deadline.remaining())
    except (OSError, asyncio.TimeoutError) as error:
        sock.close()
        raise BackendUnavailable(f"the store of generation {generation} does not answer") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def _port(supervisor: socket.socket, generation: int, deadline: Deadline) -> int:
    try:
        with supervisor:
            supervisor.sendall(frames.pack(frames.Frame(message=OpenStore(generation=generation))))
            reader = frames.HeaderReader(supervisor)
            while (frame := reader.advance()) is None:
                await wait_for({supervisor.fileno(): READABLE}, deadline.remaining())
    except OSError as error:
        raise BackendUnavailable("the backend behind the gateway is ending") from error
    if isinstance(frame.message, Error):
        raise from_code(frame.message.code, frame.message.message)
    if not isinstance(frame.message, StorePort):
        raise ProtocolError(f"the supervisor answered {type(frame.message).__name__} where StorePort was expected")
    return frame.message.port
