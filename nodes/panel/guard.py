"""Who may use the panel's routes.

A page of another origin may do nothing. Where other machines reach ComfyUI, only its own users may change something.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from comfy.cli_args import args

LISTEN, MULTI_USER = "listen", "multi_user"
"""Flags of ComfyUI."""
OWN_SITES = ("same-origin", "none")
"""What a browser says of a request of the page itself, or of the address bar (``Sec-Fetch-Site``)."""
USER = "comfy-user"
"""The header by which ComfyUI's page says who uses it."""

NOT_THIS_PAGE = "this route answers only the page of this ComfyUI: open that page itself"
NO_USER = (
    "other machines can reach this ComfyUI, so that only its own users may change something here: start it with "
    "--multi-user and choose a user, or without --listen"
)


class Users(Protocol):
    """ComfyUI's users."""

    users: Mapping[str, Any]


def refused_origin(headers: Mapping[str, str]) -> str:
    """Return why a request may not be answered; "" if it may. Programs other than browsers send neither header."""
    site, origin = headers.get("Sec-Fetch-Site", ""), headers.get("Origin", "")
    if site and site not in OWN_SITES:
        return NOT_THIS_PAGE
    return NOT_THIS_PAGE if origin and not _same(origin, headers.get("Host", "")) else ""


def refused_change(headers: Mapping[str, str], users: Users) -> str:
    """Return why a request may not change something; "" if it may."""
    if listens_here(getattr(args, LISTEN)):
        return ""
    name = headers.get(USER, "")
    return "" if getattr(args, MULTI_USER) and name and name in users.users else NO_USER


def listens_here(addresses: str) -> bool:
    """Whether ``--listen`` names only addresses that other machines cannot reach."""
    return all(_is_loopback(each.strip()) for each in addresses.split(","))


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, which may mean anything
        return False


def _same(origin: str, host: str) -> bool:
    """Whether an origin is that of the host that a request goes to, with or without the scheme's own port."""
    parts = urlsplit(origin)
    own_port = {"http": ":80", "https": ":443"}.get(parts.scheme, "")
    return bool(parts.netloc) and host.lower() in (parts.netloc.lower(), parts.netloc.lower().removesuffix(own_port))
