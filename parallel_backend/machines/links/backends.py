"""The backends on other machines that ``PARALLEL_DIT_BACKEND`` can name."""

import socket
from dataclasses import dataclass

from ...protocol.endpoint import REMOTE, Remote
from . import remote
from .address import Address


def named(text: str) -> Remote:
    """Return the backend that the variable names.

    Raises:
        InvalidRequest: it names none.
    """
    return Gateway(address=Address.parse(text, what=REMOTE))


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A backend behind the gateway that listens at an address."""

    address: Address

    def __str__(self) -> str:
        return str(self.address)

    @property
    def place(self) -> str:
        """The machine."""
        return self.address.host

    def connect(self, seconds: float) -> socket.socket:
        """See ``remote.connect``."""
        return remote.connect(self.address, seconds=seconds)
