"""The way of ranks on other hosts to the store, which listens on this host's loopback interface alone."""

import asyncio
import socket

from ..errors import BackendUnavailable
from ..protocol.deadlines import Deadline
from ..protocol.hosts import OpenStore, StorePort
from .questions import asked


async def store_of(supervisor: socket.socket, generation: int, deadline: Deadline) -> socket.socket:
    """Ask the supervisor where the store of a set of ranks is, and connect to it. Closes ``supervisor``.

    Raises:
        BackendError: there is no such set now, or the store does not answer.
    """
    port = (await asked(supervisor, OpenStore(generation=generation), StorePort, deadline)).port
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
