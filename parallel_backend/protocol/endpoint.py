"""The endpoint of a backend: a private runtime folder with its socket, its lock and its logs, or another machine."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .. import env
from ..errors import BackendFailure, BackendUnavailable, DeadlineExceeded
from ..other_machines import machines
from .private_file import FOLDER_MODE, is_private

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket, in bytes (``sun_path`` in unix(7))."""

BACKEND_LOG = "backend.log"
REQUEST_LOG = "requests.log"
GATEWAY_LOG = "gateway.log"

_SESSION = "XDG_RUNTIME_DIR"
"""The variable that names a folder in which the runtime folder may be."""
_NAME = "parallel-dit"

_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("@ll")


def rank_log(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank{rank}.log"


class Remote(Protocol):
    """A backend on another machine, see ``machines.links.backends``. Its ``str`` says where it is."""

    @property
    def place(self) -> str:
        """The machine, as it follows "on" in a sentence."""

    @property
    def closed(self) -> str:
        """The reason if it closes a connection before it answers; "" if the client should ask again."""

    def connect(self, seconds: float) -> socket.socket:
        """See the function ``connect``."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The runtime folder of one backend. All clients that use the same folder share the backend.

    Attributes:
        folder: the runtime folder.
        log_folder: the logs' folder; None for ``logs`` in the runtime folder, which a reboot or a logout removes.
        remote: the backend, if it is on another machine. The folders mean nothing then.
    """

    folder: Path
    log_folder: Path | None = None
    remote: Remote | None = None

    def __str__(self) -> str:
        return str(self.remote or self.socket)

    @property
    def log_place(self) -> str:
        """Where a user finds the supervisor's log, for the end of a sentence."""
        return f"log: backend.log on {self.remote.place}" if self.remote else f"log: {self.log}"

    @property
    def socket(self) -> Path:
        """The supervisor's Unix socket."""
        return self.folder / "socket"

    @property
    def lock(self) -> Path:
        """The file that the one supervisor keeps locked while it lives."""
        return self.folder / "lock"

    @property
    def by_hand(self) -> Path:
        """A file that exists while a backend for several machines should run. No client can start such a backend."""
        return self.folder / "started-by-hand"

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self.log_folder or self.folder / "logs"

    @property
    def log(self) -> Path:
        """The supervisor's log."""
        return self.logs / BACKEND_LOG

    @property
    def start_log(self) -> Path:
        """Output of the supervisor's process, such as why it does not start."""
        return self.logs / "start.log"

    @property
    def request_log(self) -> Path:
        """One line for each request, see ``request_log``."""
        return self.logs / REQUEST_LOG

    def rank_log(self, rank: int) -> Path:
        """Output of all processes of a rank."""
        return self.logs / rank_log(rank)

    @property
    def spare_log(self) -> Path:
        """The log of the newest spare rank."""
        return self.logs / "spare.log"

    def has_socket(self, socket_stat: os.stat_result) -> bool:
        """Whether the socket in the folder, which clients connect to, is still the one with this ``stat``."""
        try:
            return os.path.samestat(self.socket.stat(), socket_stat)
        except OSError:
            return False

    @classmethod
    def default(cls) -> "Endpoint":
        """The endpoint that the environment names.

        The folder is ``PARALLEL_DIT_RUNTIME`` if set, otherwise one in ``XDG_RUNTIME_DIR``. If that cannot be made, it
        is one in /tmp for this user.
        ``PARALLEL_DIT_LOGS`` is the logs' folder. ``PARALLEL_DIT_BACKEND`` names a backend on another machine.

        Raises:
            InvalidRequest: that is neither an address nor a socket.
        """
        backend = env.BACKEND.get()
        return cls(
            folder=_default_folder(),
            log_folder=env.LOGS.get(),
            remote=machines("links.backends").named(backend) if backend else None,
        )

    def prepare(self) -> None:
        """Create the folder with access for only this user.

        Raises:
            BackendUnavailable: the path is too long for a socket, or the folder cannot be created, belongs to
                another user, or is accessible to others.
        """
        if not is_private(self._made()):
            raise BackendUnavailable(
                f"{self.folder} must be a folder that you own, with mode 0700: "
                f"remove it, or set {env.RUNTIME} to another one"
            )

    def _made(self) -> os.stat_result:
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            raise BackendUnavailable(
                f"the path {self.socket} is longer than {MAX_SOCKET_PATH} bytes, the limit for a Unix socket: "
                f"set {env.RUNTIME} to a shorter folder"
            )
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            return self.folder.lstat()
        except OSError as error:
            raise BackendUnavailable(
                f"the runtime folder {self.folder} cannot be created ({error.strerror}): "
                f"set {env.RUNTIME} to another one"
            ) from error


def _default_folder() -> Path:
    chosen, session = env.RUNTIME.get(), os.environ.get(_SESSION)
    if chosen:
        return chosen
    return _in_temporary() if not session or _unusable(session) else Path(session) / _NAME


def _in_temporary() -> Path:
    return Path("/tmp") / f"{_NAME}-{os.getuid()}"


def _unusable(session: str) -> str:
    """Return why there can be no runtime folder in ``XDG_RUNTIME_DIR``; "" if there can. Makes it."""
    if not os.path.isabs(session):
        return f"{session} is no absolute path"
    if not os.access(session, os.W_OK):
        return f"{session} is not there, or cannot be written to"
    try:
        Endpoint(folder=Path(session) / _NAME)._made()
    except BackendUnavailable as error:
        return str(error).partition(": ")[0]  # without the advice for a folder that somebody has chosen
    return ""


def passed_over(endpoint: Endpoint) -> str:
    """Return a sentence if an endpoint's folder replaces one in ``XDG_RUNTIME_DIR``; otherwise ""."""
    session = os.environ.get(_SESSION)
    if endpoint.remote is not None or endpoint.folder != _in_temporary() or not session:
        return ""
    reason = _unusable(session)
    return f"the runtime folder is {endpoint.folder}, not one in {_SESSION}: {reason}" if reason else ""


def connect(endpoint: Endpoint, *, seconds: float) -> socket.socket:
    """Connect to the supervisor, on this machine or another one, and return a blocking Unix socket.

    The kernel's send timeout limits the wait. Python's own timeout would make the socket non-blocking, and connecting
    to a Unix socket whose backlog is full for a moment would then fail at once (unix(7), EAGAIN).

    Raises:
        BackendUnavailable: no process listens there, or the other machine refuses.
        DeadlineExceeded: a process listens there, but accepts no connection.
        InvalidRequest: this machine's certificates cannot be used.
    """
    if endpoint.remote is not None:
        return endpoint.remote.connect(seconds)
    endpoint.prepare()
    return connect_unix(endpoint.socket, seconds)


def connect_unix(path: Path, seconds: float) -> socket.socket:
    """Connect to a Unix socket, see ``connect``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
        sock.connect(str(path))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
    except BlockingIOError as error:
        sock.close()
        message = f"the backend at {path} accepted no connection within {seconds:g} s"
        raise DeadlineExceeded(message) from error
    except OSError as error:
        sock.close()
        raise BackendUnavailable(f"no backend answers at {path}") from error
    return sock


def listen(endpoint: Endpoint, *, backlog: int) -> tuple[int, socket.socket]:
    """Become the one supervisor of this endpoint; return the lock's descriptor and the listening socket.

    Raises:
        BackendUnavailable: another supervisor holds the lock.
        BackendFailure: the disk refuses the lock or the socket.
    """
    endpoint.prepare()
    with _named_if_refused(endpoint.lock):
        lock = os.open(endpoint.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise BackendUnavailable(f"a backend already runs at {endpoint.socket}") from error
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with _named_if_refused(endpoint.socket):
            endpoint.socket.unlink(missing_ok=True)
            sock.bind(str(endpoint.socket))
    except BackendFailure:
        sock.close()
        os.close(lock)
        raise
    finally:
        os.umask(mask)
    sock.listen(backlog)
    return lock, sock


@contextlib.contextmanager
def _named_if_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendFailure(
            f"{path} cannot be made: {error.strerror}; make room and give this user the right to write there, or set "
            f"{env.RUNTIME} to another folder"
        ) from error


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer, according to the kernel (``SO_PEERCRED``)."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
