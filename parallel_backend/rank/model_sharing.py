"""How this rank takes part in bringing models of the first host to hosts that lack them."""

import socket
from typing import TYPE_CHECKING

from .. import env
from ..protocol.address import Address
from ..protocol.greeting import Goal
from ..protocol.remote import open_way
from .supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from ..engine.sharing import Sharing

OPEN_TIMEOUT = 20.0
"""Seconds that a way to a file has to be opened."""


class SocketWay:
    """A ``Way`` that a socket is. It closes the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(1.0)

    def read_into(self, room: memoryview) -> int | None:
        """See ``Way``."""
        try:
            return self._sock.recv_into(room)
        except TimeoutError:
            return None
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def __enter__(self) -> "SocketWay":
        return self

    def __exit__(self, *error: object) -> None:
        self._sock.close()


def sharing_of(rank: int, link: SupervisorLink) -> "Sharing":
    """Return what the environment says about it."""
    from ..engine.sharing import Sharing

    gateway, generation = env.GATEWAY.get(), env.GENERATION.get()

    def open_file(number: int, offset: int) -> SocketWay:
        assert gateway
        goal = Goal(generation=generation, file=number, offset=offset)
        return SocketWay(open_way(Address.parse(gateway, what=env.GATEWAY.name), seconds=OPEN_TIMEOUT, goal=goal))

    return Sharing(
        offer=link.share if rank == 0 and env.SHARE_MODELS.get() else None,
        open_file=open_file if gateway else None,
    )
