"""Network interfaces of this host."""

import errno
import fcntl
import os
import socket
import struct

from ...errors import InvalidRequest

_SIOCGIFADDR = 0x8915
"""netdevice(7)."""


def is_here(host: str) -> bool:
    """Whether a process can listen on a name or address of this host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return bool(host)


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        InvalidRequest: there is no such interface, or it has no address.
    """
    request = struct.pack("256s", os.fsencode(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            if interface not in (name for _, name in socket.if_nameindex()):
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))  # the kernel would cut a longer name off
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InvalidRequest(
                f"interface {interface!r} has no IPv4 address here ({error.strerror}); there are: {names}"
            ) from error
