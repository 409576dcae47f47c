"""Addresses of machines, and what a process may listen on."""

import socket

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.machines.links.address import Address, bound_to, listen_on
from parallel_backend.machines.links.backends import Gateway
from parallel_backend.protocol.endpoint import Endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("10.0.0.1:7400", "10.0.0.1", 7400, "10.0.0.1:7400"),
        (" First.Example:1 ", "first.example", 1, "first.example:1"),
        ("[FD00:0::1]:7400", "fd00::1", 7400, "[fd00::1]:7400"),
        ("gpu_1:65535", "gpu_1", 65535, "gpu_1:65535"),
    ],
)
def test_an_address(text: str, host: str, port: int, shown: str) -> None:
    address = Address.parse(text, what="X")
    assert address == Address(host=host, port=port)
    assert str(address) == shown


@pytest.mark.parametrize(
    "text", ["", "host", ":7400", "host:", "host:70000", "fd00::1:7400", "a b:1", "host:1x", "http://host:1", "0:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="X"):
        Address.parse(text, what="X")


def test_the_environment_names_a_backend_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Endpoint.default().remote is None
    monkeypatch.setenv("PARALLEL_DIT_BACKEND", "first.example:7400")
    endpoint = Endpoint.default()
    assert endpoint.remote == Gateway(address=Address(host="first.example", port=7400))
    assert str(endpoint) == "first.example:7400"
    assert endpoint.log_place == "log: backend.log on first.example"
    monkeypatch.setenv("PARALLEL_DIT_BACKEND", "first.example")
    with pytest.raises(InvalidRequest, match=r"PARALLEL_DIT_BACKEND 'first\.example' is not an address"):
        Endpoint.default()


def test_a_port_in_use_is_refused() -> None:
    with listen_on(Address(host="127.0.0.1", port=0), backlog=1) as first:
        address = bound_to(first)
        assert address.port > 0
        with pytest.raises(InvalidRequest, match=f"nothing can listen at {address}: Address already in use"):
            listen_on(address, backlog=1)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"192\.0\.2\.1:0.*name an address of this machine"):
        listen_on(Address(host="192.0.2.1", port=0), backlog=1)


def test_every_network_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_on(Address(host="0.0.0.0", port=0), backlog=1) as sock:
        assert bound_to(sock).host == "0.0.0.0"
    everything = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: everything)
    with pytest.raises(InvalidRequest, match=r"first\.example means every network of this machine"):
        listen_on(Address(host="first.example", port=0), backlog=1)
