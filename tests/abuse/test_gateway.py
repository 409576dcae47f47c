"""Strangers at the gateway: each is refused in one sentence, none costs others anything, and no secret is logged."""

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend import env
from parallel_backend.client.client import Client
from parallel_backend.errors import BackendUnavailable, DeadlineExceeded, InvalidRequest
from parallel_backend.machines.certificates import tls
from parallel_backend.machines.certificates.tls import TOKEN, Credentials
from parallel_backend.machines.links import greeting
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.links.backends import Gateway
from parallel_backend.machines.links.greeting import Goal
from parallel_backend.protocol.endpoint import GATEWAY_LOG, Endpoint, connect
from parallel_backend.protocol.messages import Trial
from scripts.processes import wait_until
from tests.faults.backend import TWO_RANKS, start_fake
from tests.faults.conftest import runtime_folder
from tests.faults.over_gateway import client_of, gateway_of
from tests.support.certificates import WITH_CERTIFICATE, WITH_TOKEN, authority_of, copied, made, write_client

SECONDS = 10.0
MEMORY = 48 << 20
"""Bytes by which the gateway may grow in a test."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("abuse") / "certificates")


@pytest.fixture(scope="module")
def backend(certificates: Path) -> Iterator[Client]:
    """A backend that listens, whose ranks have started."""
    with runtime_folder() as folder:
        client = start_fake(folder, certificates=certificates)
        client.call(Trial(name="echo", model=TWO_RANKS), {})
        yield client


@pytest.fixture
def address(backend: Client, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Where it listens. After the test, the same gateway serves a good client, and its log has no token."""
    gateway = gateway_of(backend)
    before = psutil.Process(gateway).memory_info().rss
    yield Address.parse(backend.status().listens, what="address")
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    sent = {"x": torch.arange(4.0)}
    assert torch.equal(
        client_of(backend.status().listens).call(Trial(name="echo", model=TWO_RANKS), sent)["x"], sent["x"]
    )
    assert gateway_of(backend) == gateway
    assert psutil.Process(gateway).memory_info().rss - before < MEMORY
    assert backend.status().internal_errors == 0
    assert "Traceback" not in log(backend)
    assert (certificates / TOKEN).read_text().strip() not in log(backend) + backend.endpoint.log.read_text()


def log(backend: Client) -> str:
    path = backend.endpoint.logs / GATEWAY_LOG
    return path.read_text() if path.exists() else ""


def refused_lines(backend: Client) -> int:
    return log(backend).count("refused 127.0.0.1:")


@contextlib.contextmanager
def one_more_refusal(backend: Client) -> Iterator[None]:
    """Something that the gateway refuses, and says so with the peer's address."""
    before = refused_lines(backend)
    yield
    wait_until(lambda: refused_lines(backend) == before + 1, SECONDS, "the refusal is logged")


def foreign_certificate(folder: Path, other: Path) -> None:
    write_client(folder, authority_of(other).sign_client(days=1))


def expired_certificate(folder: Path, other: Path) -> None:
    write_client(folder, authority_of(folder.parent / "own").sign_client(days=-1))


def wrong_token(folder: Path, other: Path) -> None:
    (folder / TOKEN).write_text("x" * 43)


def foreign_authority(folder: Path, other: Path) -> None:
    (folder / "ca.pem").write_bytes((other / "ca.pem").read_bytes())


CASES: list[tuple[tuple[str, ...], Callable[[Path, Path], None], str]] = [
    (WITH_CERTIFICATE, foreign_certificate, "not of the authority that the backend knows"),
    (WITH_CERTIFICATE, expired_certificate, "this machine's certificate has expired"),
    (WITH_TOKEN, wrong_token, "this machine's token is not the backend's: copy the file token again"),
    (WITH_TOKEN, foreign_authority, "is not of our authority"),
]


@pytest.mark.parametrize(("files", "change", "words"), CASES, ids=[change.__name__ for _, change, _ in CASES])
@pytest.mark.daily(2)
def test_a_client_that_is_not_known_is_told_why(
    backend: Client, address: Address, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...], change: Callable[[Path, Path], None], words: str,
) -> None:  # fmt: skip
    other = made(tmp_path / "other")
    (tmp_path / "own").symlink_to(certificates)
    mine = copied(certificates, tmp_path / "mine", files)
    change(mine, other)
    monkeypatch.setattr(tls, "valid_until", lambda pem: datetime.max.replace(tzinfo=timezone.utc))  # the gateway checks
    monkeypatch.setenv(env.CERTIFICATES.name, str(mine))
    for _ in range(5):  # the answer may not get lost when the gateway closes
        with one_more_refusal(backend), pytest.raises(BackendUnavailable, match=words) as raised:
            client_of(str(address)).status()
        assert str(raised.value).count("\n") == 0
        assert str(address) in str(raised.value) or "token" in words


def test_a_server_that_its_certificate_does_not_name_is_not_talked_to(
    address: Address, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    with pytest.raises(BackendUnavailable, match=r"does not name localhost: make one there with .* --hosts localhost"):
        client_of(f"localhost:{address.port}").status()


def greeted(address: Address, certificates: Path, data: bytes, *, certificate: bool = False) -> bytes:
    """Send bytes over TLS as a client without a certificate; return all that it is answered."""
    files = Credentials.of_client(certificates)
    known = files if certificate else Credentials(ca=files.ca, certificate=None, key=None)
    with socket.create_connection((address.host, address.port), timeout=SECONDS) as sock:
        secured = known.client_context().wrap_socket(sock, server_hostname=address.host)
        secured.sendall(data)
        answer = b""
        while chunk := secured.recv(1 << 16):
            answer += chunk
        secured.close()
    return answer


def refusal(answer: bytes) -> str:
    """Return the sentence of a refusal."""
    assert answer[:1] == greeting.REFUSED
    return str(greeting.unpack_refusal(answer[1 + greeting.LENGTH.size :]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (greeting.pack(""), "neither a certificate nor a token"),
        (greeting.pack("é" * 20), "this machine's token is not the backend's"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "does not speak Parallel DiT's protocol"),
        (greeting.HEAD.pack(greeting.MAGIC, 9, 0, 0), "greets in version 9 and this gateway in version 3"),
        (greeting.HEAD.pack(greeting.MAGIC, greeting.VERSION, 0, 60000) + bytes(4 << 20), "a token of 60000 bytes"),
    ],
)
@pytest.mark.daily(2)
def test_what_is_no_good_greeting_is_refused(
    backend: Client, address: Address, certificates: Path, data: bytes, words: str
) -> None:
    with one_more_refusal(backend):
        assert words in refusal(greeted(address, certificates, data))


def test_a_certificate_needs_no_token(address: Address, certificates: Path) -> None:
    """What follows the greeting reaches the supervisor, which refuses it."""
    answer = greeted(address, certificates, greeting.pack("") + b"x" * 100, certificate=True)
    assert answer[:1] == greeting.ACCEPTED
    assert b"does not speak Parallel DiT's protocol" in answer


def test_a_known_client_gets_no_store_of_ranks_that_have_ended(
    backend: Client, address: Address, certificates: Path
) -> None:
    backend.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(3)})
    words = greeting.pack("", Goal(generation=7))
    with one_more_refusal(backend):
        answer = refusal(greeted(address, certificates, words, certificate=True))
    assert "generation 7 of the ranks has ended" in answer


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff" + bytes(70000), b""])
def test_what_is_not_tls_is_refused(backend: Client, address: Address, data: bytes) -> None:
    with one_more_refusal(backend), socket.create_connection((address.host, address.port), timeout=SECONDS) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := sock.recv(1 << 16):
                received += chunk
    assert len(received) < 100
    assert b"PDiT" not in received


def test_a_client_that_finds_no_tls_is_told_so(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        client = Endpoint(folder=Path("/no/such/folder"), remote=Gateway(address=Address(host=host, port=port)))
        with pytest.raises(DeadlineExceeded, match=rf"connecting to the backend at {host}:{port} took longer than 0.5"):
            connect(client, seconds=0.5)
        accepted, _ = listener.accept()
        accepted.close()


def test_a_client_without_certificates_does_not_even_connect(
    tmp_path: Path, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CERTIFICATES.name, str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match=r"/none/ca\.pem cannot be read \(No such file or directory\)"):
        client_of(str(address)).status()


@contextlib.contextmanager
def strangers(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, or the beginning of a handshake."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            sock = stack.enter_context(socket.create_connection((address.host, address.port), timeout=SECONDS))
            sock.sendall(b"\x16\x03\x01\x02\x00" if number % 2 else b"")
            found.append(sock)
        yield found


def test_two_hundred_slow_handshakes_keep_nothing_from_being_answered(
    backend: Client, address: Address, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CERTIFICATES.name, str(certificates))
    remote = client_of(str(address))
    with strangers(address, 200) as connections:
        for client in (backend, remote):
            for _ in range(10):
                start = time.monotonic()
                assert client.status().state == "idle"
                assert time.monotonic() - start < 3.0
        assert remote.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(3)})
        with contextlib.suppress(ConnectionError):
            assert connections[0].recv(1) == b"", "the oldest made room"
        connections[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            connections[-1].recv(1)
    assert "connections are in their handshake" in log(backend)


def test_a_handshake_that_takes_too_long_is_ended(backend: Client, address: Address, certificates: Path) -> None:
    context = Credentials.of_client(certificates).client_context()
    start = time.monotonic()
    with (
        one_more_refusal(backend),
        socket.create_connection((address.host, address.port), timeout=30) as sock,
        context.wrap_socket(sock, server_hostname=address.host) as secured,
    ):
        secured.sendall(greeting.pack("")[:-1])  # never the last byte
        assert b"handshake and greeting together took longer than 10 s" in secured.recv(1 << 16)
    assert 9.0 < time.monotonic() - start < 30.0


def test_a_flood_of_refusals_fills_no_log(backend: Client, address: Address) -> None:
    before, start = refused_lines(backend), time.monotonic()
    for _ in range(500):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((address.host, address.port), timeout=SECONDS) as sock,
        ):
            sock.sendall(b"x" * 20)
    assert refused_lines(backend) - before <= 20 * (2 + time.monotonic() - start)


def test_a_stranger_does_not_reach_the_supervisor(backend: Client, address: Address, certificates: Path) -> None:
    """Not even a connection of it does."""
    supervisor = psutil.Process(backend.status().pid)
    with socket.create_connection((address.host, address.port), timeout=SECONDS) as sock:
        context = Credentials(ca=certificates / "ca.pem", certificate=None, key=None).client_context()
        with context.wrap_socket(sock, server_hostname=address.host) as secured:
            before = supervisor.num_fds()
            secured.sendall(greeting.pack("y" * 43))
            assert secured.recv(1) == greeting.REFUSED
            assert supervisor.num_fds() == before
            with contextlib.suppress(ssl.SSLError):
                secured.unwrap()
