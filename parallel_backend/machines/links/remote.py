"""A client's connection to a backend on another machine.

The client gets one end of a pair of Unix sockets, which behaves like a connection to a backend on this machine. A
thread carries the bytes between the other end and TLS.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from ...errors import BackendError, BackendUnavailable, DeadlineExceeded
from ...protocol.deadlines import Deadline
from ..certificates.tls import Credentials, default_folder
from . import greeting
from .address import Address
from .relay import Relay, set_options

_WRONG_NAME = (62, 64)
_EXPIRED = 10
"""Of the ``X509_V_ERR`` codes of OpenSSL."""
_ALERTS = {
    "EXPIRED": "this machine's certificate has expired",
    "UNKNOWN_CA": "this machine's certificate is not of the authority that the backend knows",
    "BAD_CERTIFICATE": "the backend refuses this machine's certificate",
    "UNSUPPORTED_CERTIFICATE": "this machine's certificate is not one of a client",
    "DECRYPT_ERROR": "this machine's certificate is not of the authority that the backend knows",
    "PROTOCOL_VERSION": "the backend's TLS is older than 1.3",
}
"""What OpenSSL calls the other side's alerts, by a part of the name, and what they mean to a client."""
_AGAIN = "make certificates with python -m parallel_backend certificates there, and copy them again"


def connect(address: Address, *, seconds: float, folder: Path | None = None) -> socket.socket:
    """Connect to a backend's supervisor, and return a blocking socket that behaves like one to a backend here.

    For arguments and errors see ``open_way``.
    """
    return _relayed(open_way(address, seconds=seconds, folder=folder), address)


def open_way(
    address: Address, *, seconds: float, folder: Path | None = None, goal: greeting.Goal = greeting.SUPERVISOR
) -> ssl.SSLSocket:
    """Connect to a backend's gateway, and through it to the supervisor, a store or a file.

    Args:
        address: the gateway's.
        seconds: time limit for everything together.
        folder: with this machine's certificates; None for the default one.
        goal: the target behind the gateway.

    Raises:
        InvalidRequest: this machine's certificates cannot be used.
        BackendUnavailable: nothing listens there, one side does not trust the other, or there is no backend.
        DeadlineExceeded: it does not answer in time.
        BackendError: another refusal.
    """
    deadline = Deadline(seconds, f"connecting to the backend at {address}")
    credentials = Credentials.of_client(folder or default_folder())
    context = credentials.client_context()
    sock = _connect_tcp(address, deadline)
    try:
        set_options(sock)
        with _explained(address, deadline):
            sock.settimeout(deadline.remaining())
            way = context.wrap_socket(sock, server_hostname=address.host)
            sock = way
            _greet(way, greeting.pack(credentials.token, goal), deadline)
        return way
    except BaseException:
        sock.close()
        raise


def unavailable(address: Address, reason: str) -> BackendUnavailable:
    """Return the error about an unreachable backend on another machine."""
    return BackendUnavailable(
        f"no backend answers at {address}: {reason}; start it there with python -m parallel_backend serve "
        f"--listen {address}, or --nnodes and --interface for several hosts"
    )


def _connect_tcp(address: Address, deadline: Deadline) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=deadline.remaining())
    except TimeoutError as error:
        raise unavailable(address, f"there was no answer within {deadline.seconds:g} s") from error
    except OSError as error:
        raise unavailable(address, error.strerror or str(error)) from error


def _greet(sock: ssl.SSLSocket, words: bytes, deadline: Deadline) -> None:
    """Say who this is, and wait until the gateway agrees.

    Raises:
        BackendError: it refuses.
        OSError: the connection breaks.
    """
    sock.sendall(words)
    if _received(sock, 1, deadline) == greeting.ACCEPTED:
        return
    (length,) = greeting.LENGTH.unpack(_received(sock, greeting.LENGTH.size, deadline))
    raise greeting.unpack_refusal(_received(sock, length, deadline))


def _received(sock: ssl.SSLSocket, count: int, deadline: Deadline) -> bytes:
    received = b""
    while len(received) < count:
        sock.settimeout(deadline.remaining())
        chunk = sock.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        received += chunk
    return received


@contextlib.contextmanager
def _explained(address: Address, deadline: Deadline) -> Iterator[None]:
    """Describe in one sentence why a handshake failed."""
    try:
        yield
    except BackendError:
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"{deadline.phase} took longer than {deadline.seconds:g} s") from error
    except ssl.SSLCertVerificationError as error:
        raise BackendUnavailable(_distrust(address, error)) from error
    except OSError as error:
        raise BackendUnavailable(_refusal(address, error)) from error


def _distrust(address: Address, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_NAME:
        hosts = f"python -m parallel_backend certificates --hosts {address.host}"
        return f"the certificate of the backend at {address} does not name {address.host}: make one there with {hosts}"
    if error.verify_code == _EXPIRED:
        return f"the certificate of the backend at {address} has expired: {_AGAIN}"
    return f"the certificate of the backend at {address} is not of our authority ({error.verify_message}): {_AGAIN}"


def _refusal(address: Address, error: OSError) -> str:
    name = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" in name:
        meaning = next((text for part, text in _ALERTS.items() if part in name), f"it refuses ({name.lower()})")
        return f"no backend can be reached at {address}: {meaning}; {_AGAIN}"
    if name and name != "UNEXPECTED_EOF_WHILE_READING":
        return f"what answers at {address} does not speak TLS 1.3 ({name.lower()}): name the address of a backend"
    return f"the gateway at {address} closed the connection before it agreed: try again, and see its log gateway.log"


def _relayed(tls: ssl.SSLSocket, address: Address) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    relay = Relay(tls, theirs, serves=False)
    threading.Thread(target=relay.run, name=f"relay to {address}", daemon=True).start()
    return ours
