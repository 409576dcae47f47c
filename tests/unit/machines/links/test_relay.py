"""A relay on each side of TLS makes two plain sockets behave like the two ends of one connection."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parallel_backend.machines.certificates.tls import Credentials
from parallel_backend.machines.links import relay
from parallel_backend.machines.links.relay import Relay
from scripts.processes import wait_until
from tests.support.certificates import made

SECONDS = 30.0
MOST = 8 << 20
"""More than all buffers on the way hold: four of a socket, and one of each relay."""


@dataclass(kw_only=True)
class Line:
    """A client's socket and the supervisor's, with two relays between them."""

    client: socket.socket
    supervisor: socket.socket
    relays: list[threading.Thread] = field(default_factory=list)

    def ended(self) -> bool:
        """Whether both relays have ended."""
        return not any(thread.is_alive() for thread in self.relays)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.of_server(made(tmp_path_factory.mktemp("relay") / "certificates"))


@pytest.fixture
def line(credentials: Credentials) -> Iterator[Line]:
    client, client_plain = socket.socketpair()
    supervisor, supervisor_plain = socket.socketpair()
    for end in (client, supervisor):
        end.settimeout(SECONDS)
    found = Line(client=client, supervisor=supervisor)
    folder = credentials.ca.parent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outgoing = socket.create_connection(listener.getsockname())
        incoming, _ = listener.accept()
    for sock in (outgoing, incoming):
        relay.set_options(sock)

    def serve() -> None:
        tls = credentials.server_context().wrap_socket(incoming, server_side=True)
        Relay(tls, supervisor_plain, serves=True).run()

    def connect() -> None:
        context = Credentials.of_client(Path(folder)).client_context()
        tls = context.wrap_socket(outgoing, server_hostname="127.0.0.1")
        Relay(tls, client_plain, serves=False).run()

    for target in (serve, connect):
        found.relays.append(threading.Thread(target=target, daemon=True))
        found.relays[-1].start()
    yield found
    client.close()
    supervisor.close()
    for thread in found.relays:
        thread.join(SECONDS)
    assert found.ended(), "a relay outlives both of its ends"


def read(sock: socket.socket, count: int) -> bytes:
    """Read this many bytes, or fewer if the peer ends before."""
    found = bytearray()
    while len(found) < count and (chunk := sock.recv(min(1 << 16, count - len(found)))):
        found += chunk
    return bytes(found)


def fill(sock: socket.socket) -> int:
    """Write until nothing more is taken for a moment; return how many bytes were."""
    sock.settimeout(0.5)
    taken = 0
    with contextlib.suppress(TimeoutError):
        while taken < 10 * MOST:
            taken += sock.send(bytes(1 << 16))
    return taken


def test_bytes_arrive_in_order_both_ways_at_once(line: Line) -> None:
    there, back = os.urandom(3 << 20), os.urandom(5 << 20)
    received: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=line.client.sendall, args=(there,)),
        threading.Thread(target=line.supervisor.sendall, args=(back,)),
        threading.Thread(target=lambda: received.update(there=read(line.supervisor, len(there)))),
        threading.Thread(target=lambda: received.update(back=read(line.client, len(back)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert received == {"there": there, "back": back}


@pytest.mark.parametrize("sender", ["client", "supervisor"])
def test_whoever_sends_waits_for_whoever_reads(line: Line, sender: str) -> None:
    taken = fill(getattr(line, sender))
    assert 0 < taken < MOST
    reader = line.supervisor if sender == "client" else line.client
    assert len(read(reader, taken)) == taken


def test_all_that_the_supervisor_has_sent_arrives_before_the_end(line: Line) -> None:
    sent = os.urandom(1 << 20)

    def write() -> None:
        line.supervisor.sendall(sent)
        line.supervisor.close()

    writing = threading.Thread(target=write)
    writing.start()
    assert read(line.client, 2 * len(sent)) == sent
    writing.join(SECONDS)


def test_an_answer_arrives_although_the_question_was_not_read(line: Line) -> None:
    """A supervisor refuses and closes before it has read all."""
    line.client.sendall(bytes(200_000))
    assert line.supervisor.recv(1) == b"\0"
    line.supervisor.sendall(b"refused")
    line.supervisor.close()
    assert read(line.client, 7) == b"refused"
    with contextlib.suppress(ConnectionError):
        assert line.client.recv(1) == b""


def test_the_end_of_a_client_is_seen_at_once(line: Line) -> None:
    line.client.sendall(b"x")
    assert line.supervisor.recv(1) == b"x"
    line.client.close()
    assert line.supervisor.recv(1) == b""
    wait_until(line.ended, SECONDS, "both relays have ended")


def test_the_end_of_a_client_is_seen_although_its_bytes_are_not_read(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent fills all buffers of the way."""
    monkeypatch.setattr(relay, "LINGER", 0.5)
    fill(line.client)
    line.client.close()
    wait_until(line.ended, SECONDS, "both relays have ended")


def test_a_client_that_does_not_read_is_given_up_once_the_supervisor_has_ended(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "FLUSH", 0.5)
    fill(line.supervisor)
    serving = line.relays[0]
    assert serving.is_alive()
    line.supervisor.close()
    wait_until(lambda: not serving.is_alive(), SECONDS, "the gateway's side has ended")
