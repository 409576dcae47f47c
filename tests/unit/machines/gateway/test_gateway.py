"""The gateway by itself, in front of a supervisor that answers nothing."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallel_backend.errors import BackendUnavailable, QueueFull
from parallel_backend.machines.certificates.tls import Credentials
from parallel_backend.machines.gateway.admission import Admission
from parallel_backend.machines.gateway.gateway import Gateway
from parallel_backend.machines.links import greeting
from parallel_backend.machines.links.address import Address, bound_to, listen_on
from parallel_backend.machines.links.remote import open_way
from tests.support.certificates import made

SECONDS = 10.0


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        with listen_on(Address(host=request.param, port=0), backlog=8) as sock:
            yield sock
    except OSError:
        pytest.skip(f"this machine has no {request.param}")


def behind_gateway(
    listener: socket.socket, folder: Path, clients: Callable[[Address, Path, socket.socket], None]
) -> None:
    """Run clients in a thread while a gateway for at most two connections serves them."""
    certificates = made(folder / "certificates", bound_to(listener).host)
    credentials = Credentials.of_server(certificates)
    path = folder / "supervisor"

    async def serve() -> None:
        admission = Admission(context=credentials.server_context(), token=credentials.token, supervisor=path)
        with socket.socket(socket.AF_UNIX) as supervisor:
            supervisor.bind(str(path))
            supervisor.listen(8)
            supervisor.setblocking(False)
            serving = asyncio.create_task(Gateway(listener, admission, connections=2).serve())
            await asyncio.to_thread(clients, bound_to(listener), certificates, supervisor)
            serving.cancel()

    asyncio.run(asyncio.wait_for(serve(), 60.0))


def test_no_more_connections_are_let_in_than_it_may_have(listener: socket.socket, tmp_path: Path) -> None:
    def clients(address: Address, folder: Path, supervisor: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(open_way(address, seconds=SECONDS, folder=folder))
            stack.enter_context(open_way(address, seconds=SECONDS, folder=folder))
            with pytest.raises(QueueFull, match="more than 2 connections from other machines are open"):
                open_way(address, seconds=SECONDS, folder=folder)
            first.close()
            stack.enter_context(reopened(address, folder))

    behind_gateway(listener, tmp_path, clients)


def reopened(address: Address, folder: Path) -> ssl.SSLSocket:
    """Open a way as soon as the gateway has noticed that another one was closed."""
    overdue = time.monotonic() + SECONDS
    while time.monotonic() < overdue:
        with contextlib.suppress(QueueFull):
            return open_way(address, seconds=SECONDS, folder=folder)
    raise AssertionError("the connection that was closed still counts")


def test_a_recorded_connection_cannot_be_replayed(listener: socket.socket, tmp_path: Path) -> None:
    """TLS 1.3 has fresh keys each time, so that the same bytes mean nothing in another connection."""

    def clients(address: Address, folder: Path, supervisor: socket.socket) -> None:
        sent, sock = bytearray(), socket.create_connection((address.host, address.port), timeout=SECONDS)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        credentials = Credentials.of_client(folder)
        secured = credentials.client_context().wrap_bio(incoming, outgoing, server_hostname=address.host)

        def carried(call: Callable[[], object]) -> object:
            while True:
                try:
                    return call()
                except ssl.SSLWantReadError:
                    sent.extend(words := outgoing.read())
                    sock.sendall(words)
                    incoming.write(sock.recv(1 << 16))

        with sock:
            carried(secured.do_handshake)
            secured.write(greeting.pack(credentials.token))
            assert carried(lambda: secured.read(1)) == greeting.ACCEPTED
        with socket.create_connection((address.host, address.port), timeout=SECONDS) as again:
            again.sendall(sent)
            again.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while again.recv(1 << 16):
                    pass
        supervisor.accept()[0].close()
        with pytest.raises(BlockingIOError):
            supervisor.accept()

    behind_gateway(listener, tmp_path, clients)


def test_a_gateway_without_a_supervisor_says_so(listener: socket.socket, tmp_path: Path) -> None:
    def clients(address: Address, folder: Path, supervisor: socket.socket) -> None:
        (tmp_path / "supervisor").unlink()
        with pytest.raises(BackendUnavailable, match="the backend behind the gateway is ending"):
            open_way(address, seconds=SECONDS, folder=folder)

    behind_gateway(listener, tmp_path, clients)
