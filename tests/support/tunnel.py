"""What ``ssh -L`` of a Unix socket does, on one machine."""

import contextlib
import socket
import threading
from pathlib import Path


class Tunnel:
    """Accepts every connection at a path, and carries its bytes to another one, or closes it if nothing listens there.

    Args:
        path: where it listens.
        target: where the backend listens.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                far.connect(str(self._target))
            except OSError:
                near.close()
                far.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(one, other), daemon=True).start()

    def close(self) -> None:
        """End as ssh does: all connections break, and the socket's file stays."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _carry(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for sock in (one, other):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
