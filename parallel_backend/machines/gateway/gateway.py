"""Accepts connections from other machines, and carries the bytes of admitted ones."""

import asyncio
import logging
import signal
import socket

from ...errors import BackendError, QueueFull
from ..links.address import Address
from ..links.relay import Relay
from .admission import Admission
from .waiting import wait_for

log = logging.getLogger(__name__)

_PAUSE = 0.5
"""Seconds for which no connection is accepted once there is no descriptor left for one."""


class Gateway:
    """Serves one listening socket until SIGTERM, and then the connections that are open.

    A connection that waits for admission makes room for a newer one. An admitted connection is never closed for that.

    Args:
        listener: the listening socket.
        admission: checks clients.
        unfinished: most connections in their handshake at a time.
        connections: most admitted connections at a time.
    """

    def __init__(
        self, listener: socket.socket, admission: Admission, *, unfinished: int = 64, connections: int = 256
    ) -> None:
        self._listener, self._admission = listener, admission
        self._max_unfinished, self._max_connections = unfinished, connections
        self._unfinished: dict[asyncio.Task[None], Address] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0

    async def serve(self) -> None:
        """Accept connections until SIGTERM; return once all of them have ended."""
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._accept())
        loop.add_signal_handler(signal.SIGTERM, accepting.cancel)
        await asyncio.wait([accepting])
        self._listener.close()
        for task in list(self._unfinished):
            task.cancel()
        if not accepting.cancelled():
            accepting.result()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("a connection is not accepted: %s", error)
                await asyncio.sleep(_PAUSE)
                continue
            sock.setblocking(False)
            if len(self._unfinished) >= self._max_unfinished:
                self._drop_oldest()
            address = Address(host=str(peer[0]), port=int(peer[1]))
            self._begin(sock, address)

    def _begin(self, sock: socket.socket, address: Address) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(sock, address))
        self._unfinished[task] = address
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: sock.close())  # the connection may have been dropped before its task began

    def _drop_oldest(self) -> None:
        task, address = next(iter(self._unfinished.items()))
        log.warning("dropped %s: more than %d connections are in their handshake", address, self._max_unfinished)
        del self._unfinished[task]
        task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._unfinished.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("an error that should not have happened", exc_info=task.exception())

    def _check_room(self) -> None:
        if self._open >= self._max_connections:
            raise QueueFull(f"more than {self._max_connections} connections from other machines are open")

    async def _serve(self, sock: socket.socket, address: Address) -> None:
        try:
            tls, supervisor = await self._admission.admit(sock, self._check_room)
        except BackendError as error:
            log.warning("refused %s: %s", address, error)
            return
        except OSError as error:
            log.warning("refused %s: %s", address, error.strerror or error)
            return
        task = asyncio.current_task()
        assert task is not None
        self._unfinished.pop(task, None)
        self._open += 1
        try:
            await _carry(Relay(tls, supervisor, serves=True))
        finally:
            self._open -= 1


async def _carry(relay: Relay) -> None:
    try:
        while relay.step():
            await wait_for(relay.interests(), relay.timeout)
    finally:
        relay.close()
