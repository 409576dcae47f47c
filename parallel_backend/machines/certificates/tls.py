"""Who may talk to whom between machines: certificates of a private authority, a token, and TLS 1.3 alone.

``python -m parallel_backend certificates`` makes the files.
"""

import os
import ssl
import stat
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from cryptography import x509

from ... import env
from ...errors import InvalidRequest

CA, CA_KEY, TOKEN = "ca.pem", "ca.key", "token"
SERVER, SERVER_KEY = "server.pem", "server.key"
CLIENT, CLIENT_KEY = "client.pem", "client.key"
MIN_TOKEN, MAX_TOKEN = 32, 512
"""Characters of a token."""


def default_folder() -> Path:
    """The folder of this machine's certificates: ``PARALLEL_DIT_CERTIFICATES``, or one in the user's settings."""
    if chosen := env.CERTIFICATES.get():
        return chosen
    settings = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(settings) if os.path.isabs(settings) else Path.home() / ".config") / "parallel-dit" / "certificates"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The credentials of one side of a connection, and the authority by which it checks the other side.

    Attributes:
        ca: certificate of the authority that signed both sides' certificates.
        certificate: this side's own; None for a client that has a token instead.
        key: the certificate's private key.
        token: a secret that stands for a client's certificate; "" if there is none.
    """

    ca: Path
    certificate: Path | None
    key: Path | None
    token: str = field(default="", repr=False)

    @classmethod
    def of_server(cls, folder: Path) -> "Credentials":
        """Read and check the files of a server. Without ``token``, clients need a certificate.

        Raises:
            InvalidRequest: a file is missing or unreadable, a secret one is open to others, or a certificate has
                expired.
        """
        token = folder / TOKEN
        return cls(
            ca=check_certificate(folder / CA),
            certificate=check_certificate(folder / SERVER),
            key=_secret(folder / SERVER_KEY),
            token=_token(token) if token.exists() else "",
        )

    @classmethod
    def of_client(cls, folder: Path) -> "Credentials":
        """Read and check the files of a client.

        Raises:
            InvalidRequest: see ``of_server``; or there is neither a client's certificate nor a token.
        """
        ca, certificate, token = check_certificate(folder / CA), folder / CLIENT, folder / TOKEN
        if certificate.exists():
            return cls(ca=ca, certificate=check_certificate(certificate), key=_secret(folder / CLIENT_KEY))
        if not token.exists():
            raise InvalidRequest(
                f"{folder} has neither {CLIENT} nor {TOKEN}: copy {CLIENT} and {CLIENT_KEY}, or {TOKEN}, from the "
                "machine that made the certificates"
            )
        return cls(ca=ca, certificate=None, key=None, token=_token(token))

    def server_context(self) -> ssl.SSLContext:
        """TLS for the server. A client may send a certificate, which then has to be valid.

        Raises:
            InvalidRequest: the files do not fit each other.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.num_tickets = 0  # every connection is checked anew
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS for the client, which always checks the server's certificate and name.

        Raises:
            InvalidRequest: the files do not fit each other.
        """
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.hostname_checks_common_name = False
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ``ssl.SSLError``, too
            raise InvalidRequest(
                f"{self.certificate or self.ca} cannot be used ({error.strerror or error}): copy the files again from "
                "the machine that made them"
            ) from error
        return context


def valid_until(pem: str) -> datetime:
    """Return the expiry date of the first certificate of a PEM file.

    Raises:
        ValueError: the file holds no certificate.
    """
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc


def check_certificate(path: Path) -> Path:
    """Check a certificate, and return its path.

    Raises:
        InvalidRequest: the file cannot be read, holds no certificate, or has expired.
    """
    try:
        until = valid_until(_read(path))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not a certificate: {error}") from error
    if until <= datetime.now(timezone.utc):
        renew = "python -m parallel_backend certificates" + (" --new" if path.name == CA else "")
        raise InvalidRequest(f"{path} has expired on {until:%Y-%m-%d}: make new ones with {renew}")
    return path


def _secret(path: Path) -> Path:
    """Check that nobody else can read a file, and return its path."""
    _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InvalidRequest(f"others may read {path} (mode {mode:04o}): chmod 600 {path}, or make new ones")
    return path


def _token(path: Path) -> str:
    token = _read(_secret(path)).strip()
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise InvalidRequest(f"{path} is not a token of {MIN_TOKEN} to {MAX_TOKEN} printable characters")
    return token


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): make it with python -m parallel_backend certificates, or copy "
            "it from the machine that did"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not a text file") from error
