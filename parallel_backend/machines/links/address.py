"""Addresses of machines: ``HOST:PORT``, where a host is a name or an IP address."""

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

from ...errors import InvalidRequest

UNSPECIFIED = ("0.0.0.0", "::")
"""Hosts that mean every network of this machine."""

_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_BRACKETED = re.compile(r"\[([^\]]+)\]:([0-9]{1,5})")
_PLAIN = re.compile(r"([^:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a process listens.

    Attributes:
        host: a name or an IP address, in lower case.
        port: its TCP port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, *, what: str) -> "Address":
        """Parse ``HOST:PORT`` or ``[IPv6]:PORT``. ``what`` names the text in the refusal.

        Raises:
            InvalidRequest: the text is not an address.
        """
        match = _BRACKETED.fullmatch(text.strip()) or _PLAIN.fullmatch(text.strip())
        if not match or int(match[2]) > 65535:
            raise InvalidRequest(
                f"{what} {text!r} is not an address: write a host and a port, as in 10.0.0.1:7400 or [fd00::1]:7400"
            )
        return cls(host=check_host(match[1], what=what), port=int(match[2]))


def check_host(text: str, *, what: str) -> str:
    """Return the name or IP address of a host in its usual form.

    Raises:
        InvalidRequest: the text is neither.
    """
    host = text.strip().lower()
    address = ip_address(host)
    if address is not None:
        return str(address)
    # A name of only digits would be read as an address in an unusual form, such as 0 for 0.0.0.0.
    if not _NAME.fullmatch(host) or host.rpartition(".")[2].isdecimal():
        raise InvalidRequest(f"{what}: {text!r} is neither the name of a host nor an IP address")
    return host


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address; None if the text is something else."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def listen_on(address: Address, *, backlog: int) -> socket.socket:
    """Listen on one address of this machine, or on all if the host is literally the address for all.

    Raises:
        InvalidRequest: the address is not one of this machine or is in use, or a name means all of its addresses.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        _check_specific(address.host, str(resolved[0]))
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _cannot_listen(address, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(resolved)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _cannot_listen(address, error) from error
    return sock


def _check_specific(host: str, resolved: str) -> None:
    found = ip_address(resolved)
    mapped = getattr(found, "ipv4_mapped", None) or found
    if mapped is not None and mapped.is_unspecified and host not in UNSPECIFIED:
        raise InvalidRequest(f"{host} means every network of this machine: name one of its addresses")


def _cannot_listen(address: Address, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"nothing can listen at {address}: {error.strerror}; name an address of this machine")


def bound_to(sock: socket.socket) -> Address:
    """Return the address of a listening socket."""
    name = sock.getsockname()
    return Address(host=str(name[0]), port=int(name[1]))
