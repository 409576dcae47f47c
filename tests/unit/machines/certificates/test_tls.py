"""What a machine's certificates have to be before they are used, and who trusts whom."""

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.machines.certificates.tls import (
    CLIENT,
    CLIENT_KEY,
    SERVER,
    TOKEN,
    Credentials,
    default_folder,
    valid_until,
)
from tests.support.certificates import WITH_CERTIFICATE, WITH_TOKEN, authority_of, copied, made, write_client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("machine") / "certificates", "127.0.0.1", "first.example")


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PARALLEL_DIT_CERTIFICATES", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    assert default_folder() == tmp_path / ".config/parallel-dit/certificates"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    assert default_folder() == tmp_path / "settings/parallel-dit/certificates"
    monkeypatch.setenv("PARALLEL_DIT_CERTIFICATES", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


def test_a_client_needs_a_certificate_or_a_token(folder: Path, tmp_path: Path) -> None:
    by_certificate = Credentials.of_client(copied(folder, tmp_path / "a", WITH_CERTIFICATE))
    assert (by_certificate.certificate, by_certificate.token) == (tmp_path / "a" / CLIENT, "")
    by_token = Credentials.of_client(copied(folder, tmp_path / "b", WITH_TOKEN))
    assert by_token.certificate is None
    assert by_token.token == (folder / TOKEN).read_text().strip()
    assert by_token.token not in repr(by_token)
    with pytest.raises(InvalidRequest, match=r"has neither client\.pem nor token"):
        Credentials.of_client(copied(folder, tmp_path / "c", ("ca.pem",)))


def test_a_server_may_do_without_a_token(folder: Path, tmp_path: Path) -> None:
    files = ("ca.pem", SERVER, "server.key")
    assert Credentials.of_server(copied(folder, tmp_path / "a", files)).token == ""


@pytest.mark.parametrize("missing", ["ca.pem", "server.pem", "server.key"])
def test_a_missing_file_is_named(folder: Path, tmp_path: Path, missing: str) -> None:
    rest = tuple({"ca.pem", "server.pem", "server.key"} - {missing})
    with pytest.raises(InvalidRequest, match=rf"/a/{missing} cannot be read \(No such file") as raised:
        Credentials.of_server(copied(folder, tmp_path / "a", rest))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("secret", [CLIENT_KEY, TOKEN])
def test_a_secret_that_others_may_read_is_refused(folder: Path, tmp_path: Path, secret: str) -> None:
    mine = copied(folder, tmp_path / "a", WITH_TOKEN if secret == TOKEN else WITH_CERTIFICATE)
    (mine / secret).chmod(0o640)
    with pytest.raises(InvalidRequest, match=rf"others may read .*/{secret} \(mode 0640\): chmod 600"):
        Credentials.of_client(mine)


def test_an_expired_certificate_is_refused(folder: Path, tmp_path: Path) -> None:
    mine = copied(folder, tmp_path / "a", WITH_CERTIFICATE)
    write_client(mine, authority_of(folder).sign_client(days=-1))
    with pytest.raises(InvalidRequest, match=r"client\.pem has expired on 20"):
        Credentials.of_client(mine)


@pytest.mark.parametrize("content", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_refused(folder: Path, tmp_path: Path, content: bytes) -> None:
    mine = copied(folder, tmp_path / "a", WITH_TOKEN)
    (mine / "ca.pem").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"ca\.pem is not a (certificate|text file)"):
        Credentials.of_client(mine)


def test_every_cut_of_a_certificate_is_refused(folder: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert((folder / SERVER).read_text())
    for length in range(len(der)):
        with pytest.raises(ValueError, match=r"."):
            valid_until(ssl.DER_cert_to_PEM_cert(der[:length]))


@pytest.mark.parametrize("token", ["short", "x" * 600, "x" * 40 + "\u00e9", "two\nlines" + "x" * 40])
def test_what_is_no_token_is_refused(folder: Path, tmp_path: Path, token: str) -> None:
    mine = copied(folder, tmp_path / "a", WITH_TOKEN)
    (mine / TOKEN).write_text(token)
    with pytest.raises(InvalidRequest, match=r"token is not a (token|text file)"):
        Credentials.of_client(mine)


def test_a_key_of_another_certificate_is_refused(folder: Path, tmp_path: Path) -> None:
    mine = copied(folder, tmp_path / "a", WITH_CERTIFICATE)
    (mine / CLIENT_KEY).write_bytes((folder / "server.key").read_bytes())
    with pytest.raises(InvalidRequest, match=r"client\.pem cannot be used .*copy the files again"):
        Credentials.of_client(mine).client_context()


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str | None:
    """Make a handshake and exchange a byte; return the version of TLS that both used."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)

    def serve() -> None:
        with contextlib.suppress(OSError), server.wrap_socket(theirs, server_side=True) as tls_socket:
            tls_socket.sendall(tls_socket.recv(1))

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as tls_socket:
            tls_socket.sendall(b"x")
            assert tls_socket.recv(1) == b"x"
            return tls_socket.version()
    finally:
        ours.close()
        serving.join(10)
        theirs.close()


@pytest.mark.parametrize("files", [WITH_CERTIFICATE, WITH_TOKEN])
@pytest.mark.parametrize("name", ["127.0.0.1", "first.example"])
def test_both_sides_of_one_authority_trust_each_other(folder: Path, tmp_path: Path, files: tuple[str, ...], name: str):
    client = Credentials.of_client(copied(folder, tmp_path / "a", files)).client_context()
    assert handshake(Credentials.of_server(folder).server_context(), client, name) == "TLSv1.3"


def test_older_versions_of_tls_are_refused(folder: Path) -> None:
    client = Credentials.of_client(folder).client_context()
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        handshake(Credentials.of_server(folder).server_context(), client, "127.0.0.1")


def test_a_client_cannot_pose_as_a_server_nor_a_server_as_a_client(folder: Path) -> None:
    as_server = Credentials(ca=folder / "ca.pem", certificate=folder / CLIENT, key=folder / CLIENT_KEY)
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        handshake(as_server.server_context(), Credentials.of_client(folder).client_context(), "127.0.0.1")
    as_client = Credentials(ca=folder / "ca.pem", certificate=folder / SERVER, key=folder / "server.key")
    with pytest.raises(OSError, match=r"(?i)alert|reset|broken|eof"):
        handshake(Credentials.of_server(folder).server_context(), as_client.client_context(), "127.0.0.1")


def test_a_server_that_the_certificate_does_not_name_is_refused(folder: Path) -> None:
    client = Credentials.of_client(folder).client_context()
    for name in ("10.0.0.9", "second.example"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(Credentials.of_server(folder).server_context(), client, name)
