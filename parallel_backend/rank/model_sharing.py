"""How this rank takes part in bringing models of the first host to hosts that lack them."""

import os
import socket
from typing import TYPE_CHECKING

from ..protocol.address import Address
from ..protocol.greeting import Goal
from ..protocol.hosts import GATEWAY, GENERATION, SHARE_MODELS
from ..protocol.remote import open_way
from .supervisor_link import SupervisorLink

if TYPE_CHECKING:
    from ..engine.sharing import Sharing

OPEN_TIMEOUT = 20.0
"""Seconds that a way to a file has to be opened."""


def sharing_of(rank: int, link: SupervisorLink) -> "Sharing":
    """Return what the environment says about it."""
    from ..engine.sharing import Sharing

    gateway, generation = os.environ.get(GATEWAY), os.environ.get(GENERATION, "0")

    def open_file(number: int, offset: int) -> socket.socket:
        assert gateway
        goal = Goal(generation=int(generation), file=number, offset=offset)
        return open_way(Address.parse(gateway, what=GATEWAY), seconds=OPEN_TIMEOUT, goal=goal)

    return Sharing(
        offer=link.share if rank == 0 and os.environ.get(SHARE_MODELS) == "1" else None,
        open_file=open_file if gateway else None,
    )
