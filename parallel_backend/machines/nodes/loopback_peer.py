"""Finds the user of a loopback TCP connection in ``/proc/net`` (proc(5))."""

import struct
from pathlib import Path

_V4 = f"{struct.unpack('=I', bytes([127, 0, 0, 1]))[0]:08X}"
_MAPPED = f"{0:016X}{struct.unpack('=I', bytes([0, 0, 255, 255]))[0]:08X}{_V4}"
"""127.0.0.1, as sockets of IPv4 and of IPv6 have it. torch's store uses the latter."""
_TABLES = {Path("/proc/net/tcp"): _V4, Path("/proc/net/tcp6"): _MAPPED}


def uid_of_peer(peer: int, here: int) -> int | None:
    """Return the user of the socket that is connected to a port of the loopback interface.

    Args:
        peer: that socket's port.
        here: the port to which it is connected.

    Returns:
        The user's id, or None if the connection is gone.
    """
    for table, address in _TABLES.items():
        wanted = [f"{address}:{port:04X}" for port in (peer, here)]
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[1:3] == wanted:
                return int(fields[7])
    return None
