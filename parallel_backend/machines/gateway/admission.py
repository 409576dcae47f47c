"""Lets a connection in, or refuses it in one sentence: TLS, who the client is, and the supervisor's socket."""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import BackendError, BackendUnavailable, DeadlineExceeded, ProtocolError
from ...protocol.deadlines import Deadline
from ..links import greeting
from ..links.greeting import Goal
from ..links.relay import set_options
from .store import store_of
from .waiting import drained, received, retried, sent

LINGER = 2.0
"""Seconds in which a refused client is to read why."""
_RETRY = 0.05
"""Seconds between two attempts to connect to a supervisor whose backlog is full."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a gateway asks of a client.

    Attributes:
        context: TLS.
        token: the secret that replaces a client's certificate; "" to require certificates.
        supervisor: the supervisor's socket.
        patience: seconds for handshake, greeting and the connection to the supervisor, in total.
    """

    context: ssl.SSLContext
    token: str
    supervisor: Path
    patience: float = 10.0

    async def admit(self, sock: socket.socket, check_room: Callable[[], None]) -> tuple[ssl.SSLSocket, socket.socket]:
        """Return a client's TLS connection and a connection to its goal. Closes ``sock`` if it refuses.

        ``check_room`` raises a ``BackendError`` for a known client if there are too many.

        Raises:
            BackendError: the client is refused. It has been told why, if possible.
            OSError: the connection has broken.
        """
        deadline = Deadline(self.patience, "handshake and greeting together")
        try:
            set_options(sock)
            tls = self.context.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        except OSError:
            sock.close()
            raise
        wanted = None
        try:
            await self._shake_hands(tls, deadline)
            try:
                goal = await self._check(tls, deadline)
                check_room()
                wanted = await self._reach(goal, deadline)
            except BackendError as error:
                await _refuse(tls, error)
                raise
            await sent(tls, greeting.ACCEPTED, deadline)
            return tls, wanted
        except BaseException:
            tls.close()
            if wanted is not None:
                wanted.close()
            raise

    async def _reach(self, goal: Goal, deadline: Deadline) -> socket.socket:
        """Return a connection to a client's goal.

        Raises:
            BackendError: that fails.
        """
        supervisor = await self._connect(deadline)
        if goal == greeting.SUPERVISOR:
            return supervisor
        return await store_of(supervisor, goal.generation, deadline)

    async def _shake_hands(self, tls: ssl.SSLSocket, deadline: Deadline) -> None:
        """Make the handshake.

        Raises:
            ProtocolError: it fails. OpenSSL has sent an alert. The client can read it only if this side does not close
                the connection while bytes of the client are still arriving.
        """
        try:
            await retried(tls, tls.do_handshake, deadline)
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                tls.shutdown(socket.SHUT_WR)  # of the TCP connection, after the alert
            raw = socket.socket(fileno=tls.detach())
            with raw:
                await drained(raw.fileno(), lambda: raw.recv(1 << 16), LINGER)
            raise ProtocolError(f"the handshake failed: {_described(error)}") from error

    async def _check(self, tls: ssl.SSLSocket, deadline: Deadline) -> Goal:
        """Read the greeting and return the client's goal.

        Raises:
            BackendError: the client is not known.
        """
        goal, length = greeting.unpack_head(await received(tls, greeting.HEAD.size, deadline))
        token = await received(tls, length, deadline)
        if tls.getpeercert():  # OpenSSL has verified the certificate
            return goal
        if not token:
            raise BackendUnavailable(
                "this machine has neither a certificate nor a token: copy client.pem and client.key, or token, from "
                "the machine that made the certificates"
            )
        if not self.token:
            raise BackendUnavailable("the backend has no token, and takes clients with a certificate alone")
        if not hmac.compare_digest(token, self.token.encode()):
            raise BackendUnavailable("this machine's token is not the backend's: copy the file token again")
        return goal

    async def _connect(self, deadline: Deadline) -> socket.socket:
        """Connect to the supervisor.

        Raises:
            BackendError: that fails.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            while True:
                try:
                    sock.connect(str(self.supervisor))
                    return sock
                except BlockingIOError:  # its backlog is full for a moment
                    await asyncio.sleep(min(_RETRY, deadline.remaining()))
        except OSError as error:
            sock.close()
            raise BackendUnavailable("the backend behind the gateway is ending") from error
        except BaseException:
            sock.close()
            raise


async def _refuse(tls: ssl.SSLSocket, error: BackendError) -> None:
    deadline = Deadline(LINGER, "telling a client why it is refused")
    with contextlib.suppress(OSError, DeadlineExceeded):
        await sent(tls, greeting.pack_refusal(error), deadline)
        with contextlib.suppress(OSError):  # the client's answer is not waited for
            tls.unwrap()
        raw = socket.socket(fileno=tls.detach())
        with raw:
            raw.shutdown(socket.SHUT_WR)
            await drained(raw.fileno(), lambda: raw.recv(1 << 16), LINGER)


def _described(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate: {error.verify_message}"
    return (error.reason or str(error)).lower().replace("_", " ")
