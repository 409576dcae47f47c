"""Takes connections of this host's ranks to the store on the first host, through the authenticated way in.

So the store listens on the loopback interface alone, on every host.
"""

import contextlib
import logging
import socket
import threading

from ..errors import BackendError
from ..protocol import frames
from ..protocol.deadlines import Deadline
from ..protocol.endpoint import Endpoint, connect
from ..protocol.hosts import OpenStore
from ..protocol.messages import Done
from ..protocol.relay import relay

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 20.0
"""Seconds that a connection has to be opened."""


class StoreTunnel:
    """The way to the store of one set of ranks.

    Args:
        endpoint: the backend's.
        generation: the set.

    Attributes:
        generation: the set.
        port: where ranks of this host find the store, on the loopback interface.
    """

    def __init__(self, endpoint: Endpoint, generation: int) -> None:
        self._endpoint, self.generation = endpoint, generation
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"store-{generation}", daemon=True).start()

    def close(self) -> None:
        """Take no more connections. Those that are open end with their ranks."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="store-connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                with self._open() as way:
                    relay(sock, way)
            except (BackendError, OSError) as error:
                log.warning("a rank does not reach the store: %s", error)

    def _open(self) -> socket.socket:
        deadline = Deadline(OPEN_TIMEOUT, "opening a connection to the store")
        way = connect(self._endpoint, seconds=OPEN_TIMEOUT)
        try:
            frames.send_header(
                way, frames.pack(frames.Frame(message=OpenStore(generation=self.generation))), deadline=deadline
            )
            answer = frames.recv_header(way, deadline=deadline).message
            if not isinstance(answer, Done):
                raise ConnectionRefusedError(getattr(answer, "message", "the store is not there"))
        except BaseException:
            way.close()
            raise
        return way
