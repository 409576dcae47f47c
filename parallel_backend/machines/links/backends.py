"""The backends on other machines that ``PARALLEL_DIT_BACKEND`` can name: a gateway, or the end of a tunnel."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ... import env
from ...errors import BackendUnavailable, InvalidRequest
from ...protocol.endpoint import MAX_SOCKET_PATH, Remote, connect_unix
from . import remote
from .address import Address

_UNIX = "unix:"
SERVE = "python -m parallel_backend serve --forwarded"


def named(text: str) -> Remote:
    """Return the backend that the variable names: ``HOST:PORT``, or ``unix:/PATH``.

    Raises:
        InvalidRequest: the value is neither.
    """
    if not text.startswith(_UNIX):
        return Gateway(address=Address.parse(text, what=env.BACKEND.name))
    path = Path(text.removeprefix(_UNIX))
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise InvalidRequest(
            f"{env.BACKEND} {text!r}: a path from / of at most {MAX_SOCKET_PATH} bytes has to follow {_UNIX}"
        )
    return Tunnel(path=path)


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """A backend behind the gateway that listens at an address."""

    address: Address

    closed = ""

    def __str__(self) -> str:
        return str(self.address)

    @property
    def place(self) -> str:
        """The machine."""
        return self.address.host

    def connect(self, seconds: float) -> socket.socket:
        """See ``remote.connect``."""
        return remote.connect(self.address, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Tunnel:
    """A backend whose Unix socket is forwarded by ``ssh -L``. The local socket belongs to ssh."""

    path: Path

    place = "the backend's machine"

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"

    @property
    def closed(self) -> str:
        """ssh accepts every connection, and closes it if nothing listens at the other end."""
        return (
            f"the tunnel at {self.path} is there, and no backend answers at its other end: start one there with {SERVE}"
        )

    def connect(self, seconds: float) -> socket.socket:
        """Connect to ssh.

        Raises:
            BackendUnavailable: ssh does not run here, or another user made the socket.
            DeadlineExceeded: ssh accepts no connection.
        """
        try:
            owner = self.path.stat().st_uid
            if owner == os.getuid():
                return connect_unix(self.path, seconds)
        except (OSError, BackendUnavailable) as error:
            raise BackendUnavailable(
                f"no tunnel answers at {self.path}: start ssh again, with -L {self.path}:SOCKET, where SOCKET is what "
                f"{SERVE} prints on the backend's machine"
            ) from error
        raise BackendUnavailable(f"{self.path} belongs to user {owner}: let ssh make it in a folder of mode 0700")
