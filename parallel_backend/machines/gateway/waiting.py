"""Waits on non-blocking sockets inside asyncio, each with a deadline."""

import asyncio
import contextlib
import select
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from ...protocol.deadlines import Deadline

Value = TypeVar("Value")


async def wait_for(interests: Mapping[int, int], seconds: float | None) -> None:
    """Wait until a descriptor has one of its events (``select.POLLIN``, ``select.POLLOUT``), or time is up."""
    loop = asyncio.get_running_loop()
    happened = loop.create_future()
    timer = None if seconds is None else loop.call_later(seconds, _set, happened)
    try:
        for descriptor, events in interests.items():
            if events & select.POLLIN:
                loop.add_reader(descriptor, _set, happened)
            if events & select.POLLOUT:
                loop.add_writer(descriptor, _set, happened)
        await happened
    finally:
        if timer is not None:
            timer.cancel()
        for descriptor in interests:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)


def _set(happened: "asyncio.Future[None]") -> None:
    if not happened.done():
        happened.set_result(None)


async def retried(sock: ssl.SSLSocket, call: Callable[[], Value], deadline: Deadline) -> Value:
    """Return the result of a call on a non-blocking TLS socket, once the socket is ready for it.

    Raises:
        DeadlineExceeded: see ``Deadline``.
        OSError: the call fails.
    """
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            events = select.POLLIN
        except ssl.SSLWantWriteError:
            events = select.POLLOUT
        await wait_for({sock.fileno(): events}, deadline.remaining())


async def received(sock: ssl.SSLSocket, count: int, deadline: Deadline) -> bytes:
    """Read exactly this many bytes.

    Raises:
        ConnectionResetError: the peer has closed the connection.
        DeadlineExceeded, OSError: see ``retried``.
    """
    found = bytearray(count)
    room = memoryview(found)
    while room:
        size = await retried(sock, partial(sock.recv_into, room), deadline)
        if not size:
            raise ConnectionResetError("the peer closed the connection")
        room = room[size:]
    return bytes(found)


async def sent(sock: ssl.SSLSocket, data: bytes, deadline: Deadline) -> None:
    """Send all bytes. Raises what ``retried`` does."""
    left = memoryview(data)
    while left:
        left = left[await retried(sock, partial(sock.send, left), deadline) :]


async def drained(descriptor: int, read: Callable[[], bytes], seconds: float) -> None:
    """Read and drop what a peer still sends, until it closes its end or time is up."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    with contextlib.suppress(OSError):
        while (left := end - loop.time()) > 0:
            try:
                if not read():
                    return
            except BlockingIOError:
                await wait_for({descriptor: select.POLLIN}, left)
