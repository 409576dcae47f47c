"""Carries this host's connections to the store on the first host, through its gateway.

So the store listens on the loopback interface alone, on every host.
"""

import contextlib
import logging
import os
import socket
import threading
import time

from ...errors import BackendError
from ..links.address import Address
from ..links.greeting import Goal
from ..links.relay import Relay
from ..links.remote import open_way
from .loopback_peer import uid_of_peer

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 20.0
"""Seconds that a connection has to be opened."""
PAUSE = 0.5
"""Seconds without accepting after an error, such as that no descriptor is left."""


class StoreTunnel:
    """A tunnel to the store of one set of ranks.

    Args:
        first_host: where the gateway of the first host listens.
        generation: the set.

    Attributes:
        generation: the set.
        port: the loopback port where this host's ranks find the store.
    """

    def __init__(self, first_host: Address, generation: int) -> None:
        self._first_host, self.generation = first_host, generation
        self._listener, self._closed = socket.create_server(("127.0.0.1", 0)), False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"store-{generation}", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Open ones end with their ranks."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("a connection to the store is not accepted: %s", error)
                    time.sleep(PAUSE)
                continue
            if uid_of_peer(peer[1], self.port) == os.getuid():
                threading.Thread(target=self._serve, args=(sock,), name="store-connection", daemon=True).start()
            else:
                log.warning("refused a connection to the store: another user's, or already closed")
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            way = open_way(self._first_host, seconds=OPEN_TIMEOUT, goal=Goal(generation=self.generation))
        except (BackendError, OSError) as error:
            log.warning("a rank does not reach the store: %s", error)
            sock.close()
        else:
            Relay(way, sock, serves=False).run()
