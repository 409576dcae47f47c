"""The user's choice of devices where the backend has several hosts, or is on another machine."""

from typing import cast

import pytest

from parallel_backend.client.client import Client
from parallel_backend.errors import BackendUnavailable, InvalidRequest
from parallel_backend.machines.nodes import devices as host_devices
from parallel_backend.machines.nodes.devices import devices_of
from parallel_backend.protocol.hosts import HostStatus
from parallel_backend.protocol.model_spec import Devices

TWO = Devices(kind="cuda", indices=(0, 1))
THREE = Devices(kind="cuda", indices=(0, 1, 2))
CPU = Devices(kind="cpu", indices=(0, 1))
FIRST = HostStatus(node=0, state="joined", name="a", devices=TWO)


class Hosts:
    """A client that knows hosts."""

    def __init__(self, *hosts: HostStatus, remote: bool = False) -> None:
        self._hosts, self.remote = hosts, remote

    def hosts(self) -> tuple[HostStatus, ...]:
        """The hosts."""
        if self.remote and not self._hosts:
            raise BackendUnavailable("no backend answers at 10.0.0.1:7400")
        return self._hosts


def client(*others: HostStatus, remote: bool = False) -> Client:
    return cast(Client, Hosts(FIRST, *others, remote=remote))


def host(name: str, devices: Devices, *, node: int = 1, lost: bool = False) -> HostStatus:
    return HostStatus(node=node, state="lost" if lost else "joined", name=name, devices=devices)


@pytest.fixture(autouse=True)
def two_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_devices, "parse_devices", lambda text: TWO if text == "all" else TWO.first(1))


def test_all_are_those_of_every_host_that_has_joined_and_of_one_kind() -> None:
    hosts = client(host("b", THREE), host("c", THREE, node=2, lost=True), host("d", CPU, node=3))
    devices = devices_of(hosts, "all")
    assert devices == Devices(kind="cuda", indices=(0, 1, 0, 1, 2), hosts=("", "", "b", "b", "b"))
    assert devices.host_sizes == (2, 3)


def test_a_list_names_devices_of_hosts() -> None:
    devices = devices_of(client(host("b", THREE)), " 1, cuda:2@b ,0@b")
    assert devices == Devices(kind="cuda", indices=(1, 2, 0), hosts=("", "b", "b"))
    assert devices_of(client(host("b", THREE)), "0,1") == TWO


def test_without_other_hosts_nothing_changes() -> None:
    assert devices_of(client(), "all") == TWO
    assert devices_of(cast(Client, Hosts()), "0") == TWO.first(1)


def test_a_remote_backends_devices_are_its_own() -> None:
    remote = HostStatus(node=0, state="joined", name="a", devices=THREE)
    assert devices_of(cast(Client, Hosts(remote, remote=True)), "all") == THREE
    assert devices_of(cast(Client, Hosts(remote, remote=True)), "2,0").indices == (2, 0)
    with pytest.raises(BackendUnavailable, match="no backend answers"):
        devices_of(cast(Client, Hosts(remote=True)), "all")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0@b", "the first one has to be on the first host"),
        ("0,0@c", r"'0@c' is no device; .* \(hosts that have joined: b, d\)"),
        ("0,gpu", "'gpu' is no device"),
        ("0,3@b", "there is no device 3@b; 0@b, 1@b, 2@b would work"),
        ("0,1@b,1@b", "1@b is listed twice"),
        ("0,0@d", "'0@d' is a cpu device"),
    ],
)
def test_what_is_not_there_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        devices_of(client(host("b", THREE), host("d", CPU, node=2)), text)


def test_hosts_need_a_backend() -> None:
    with pytest.raises(InvalidRequest, match="no backend of several hosts answers"):
        devices_of(cast(Client, Hosts()), "0,0@b")
