"""The messages between the supervisor and the agent of a host that has joined, over one stream socket.

Each is a length, ``u32``, and JSON. A rank's messages to its supervisor pass unchanged (``rank_control``).
"""

import socket
import struct
from typing import Any

import msgspec

from ...errors import ProtocolError
from ...protocol.model_spec import Collectives
from ...protocol.rank_control import MAX_DATAGRAM
from ...protocol.status import SpareStatus

MAX_MESSAGE = 2 * MAX_DATAGRAM
MAX_WAITING = 4 << 20
"""Bytes that may wait because the peer does not read."""
_LENGTH = struct.Struct("!I")
_CHUNK = 256 << 10


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To an agent: start a rank.

    Attributes:
        key: identifies its process in the other messages.
        generation: the set that it belongs to.
        device: PyTorch's name of its device.
        collectives: the communication backend of GPU ranks.
        ranks: number of its set's ranks on this host.
        environment: ``RANK`` and the other variables that launchers set, except for the store's.
    """

    key: int
    generation: int
    device: str
    collectives: Collectives
    ranks: int
    environment: dict[str, str]


class KillRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To an agent: kill a rank's process."""

    key: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To an agent, once a second: answer with a ``Report`` of the same number.

    Attributes:
        number: any.
        idle: whether the backend has nothing to do.
    """

    number: int
    idle: bool


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent: a rank's process runs.

    Attributes:
        was_spare: whether it waited to be made a rank.
    """

    key: int
    pid: int
    was_spare: bool


class RankSaid(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent: a message of a rank, one of ``rank_control.FromRank``."""

    key: int
    message: msgspec.Raw


class RankWrote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent: output of a rank's process, from stdout and stderr."""

    key: int
    text: str


class RankExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent: a rank's process has exited, or did not start.

    Attributes:
        returncode: see ``Popen.returncode``.
        error: why it did not start; "" if it did.
    """

    key: int
    returncode: int
    error: str = ""


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process: resident bytes, clock ticks of CPU time, and whether a thread runs or waits for a disk."""

    memory: int
    cpu_ticks: int
    busy: bool


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent: the answer to ``Ping``.

    Attributes:
        number: the ``Ping``'s.
        time: the host's clock, in seconds since the epoch.
        ranks: its ranks' processes.
        spares: its spare ranks, without a host's name.
    """

    number: int
    time: float
    ranks: dict[int, RankActivity]
    spares: tuple[SpareStatus, ...]


ToHost = StartRank | KillRank | Ping
FromHost = RankStarted | RankSaid | RankWrote | RankExited | Report


class MessageStream:
    """One end of the socket. Nothing blocks: bytes that the peer does not read at once wait for ``flush``.

    Args:
        sock: the socket, which it owns.
        kind: the union of the messages that arrive.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._sock, self._decoder = sock, msgspec.json.Decoder(kind)
        self._arrived, self._waiting = bytearray(), bytearray()
        sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._waiting)

    def send(self, message: ToHost | FromHost) -> None:
        """Send a message.

        Raises:
            ConnectionError: the peer is gone, or has not read for long.
        """
        body = msgspec.json.encode(message)
        self._waiting += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send waiting bytes, as far as the peer reads.

        Raises:
            ConnectionError: the peer is gone, or has not read for long.
        """
        try:
            while self._waiting:
                del self._waiting[: self._sock.send(self._waiting, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            if len(self._waiting) > MAX_WAITING:
                raise ConnectionAbortedError(f"the peer has not read {len(self._waiting)} bytes") from None

    def receive(self) -> list[Any]:
        """The messages that have arrived.

        Raises:
            ConnectionError: the peer is gone.
            ProtocolError: something other than a message arrived.
        """
        try:
            chunk = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        self._arrived += chunk
        return list(iter(self._next, None))

    def _next(self) -> Any:
        if len(self._arrived) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._arrived)
        if length > MAX_MESSAGE:
            raise ProtocolError(f"a message of {length} bytes is longer than {MAX_MESSAGE}")
        end = _LENGTH.size + length
        if len(self._arrived) < end:
            return None
        body = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        try:
            return self._decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message does not decode: {error}") from error

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
