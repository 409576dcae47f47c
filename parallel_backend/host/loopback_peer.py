"""Whose a TCP connection over the loopback interface is, which the kernel says in ``/proc/net/tcp`` (proc(5))."""

import struct
from pathlib import Path

_LOOPBACK = struct.unpack("=I", bytes([127, 0, 0, 1]))[0]


def uid_of_peer(peer: int, here: int, table: Path = Path("/proc/net/tcp")) -> int | None:
    """Return the user of the socket that is connected to a port of the loopback interface.

    Args:
        peer: that socket's port.
        here: the port to which it is connected.
        table: the kernel's table of connections.

    Returns:
        The user's id, or None if there is no such connection any more.
    """
    wanted = [f"{_LOOPBACK:08X}:{port:04X}" for port in (peer, here)]
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7])
    return None
