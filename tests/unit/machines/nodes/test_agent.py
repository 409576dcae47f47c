"""An agent waits for the first host whatever that says, but for what no waiting mends."""

import argparse
import os
import socket
from collections.abc import Callable

import pytest

from parallel_backend.errors import BackendUnavailable, InvalidRequest, ProtocolError, QueueFull
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.nodes import agent as agent_module
from parallel_backend.machines.nodes import command
from parallel_backend.machines.nodes.agent import Agent
from parallel_backend.machines.nodes.local_devices import local_devices
from parallel_backend.machines.nodes.loopback_peer import uid_of_peer
from parallel_backend.protocol.hosts import HostInfo
from parallel_backend.protocol.model_spec import Devices

AGENT = Agent(
    info=HostInfo(name="b", node=1, address="10.0.0.2", devices=Devices(kind="cpu", indices=(0,))),
    first_host=Address(host="10.0.0.1", port=7400),
    interface="eth0",
)


def failing(*errors: Exception) -> Callable[..., socket.socket]:
    """A ``connect`` that fails with each of these in turn."""
    left = list(errors)

    def connect(address: Address, *, seconds: float) -> socket.socket:
        raise left.pop(0)

    return connect


def test_an_agent_tries_again_until_it_is_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    passing = [QueueFull("too many"), ProtocolError("what?"), BackendUnavailable("not there"), ConnectionResetError()]
    monkeypatch.setattr(agent_module, "connect", failing(*passing, InvalidRequest("another version")))
    monkeypatch.setattr(agent_module, "RETRY", 0.0)
    with pytest.raises(InvalidRequest, match="another version"):
        AGENT.run()
    assert [record.message for record in caplog.records] == [
        f"waiting for the first host: {error}" for error in passing
    ]


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_the_kernel_says_whose_a_connection_is(family: int, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        port = server.getsockname()[1]
        client.connect((address, port))
        accepted, peer = server.accept()
        with accepted:
            assert uid_of_peer(peer[1], port) == os.getuid()
    assert uid_of_peer(1, port) is None


@pytest.mark.parametrize(("option", "variable", "spares"), [([], "", None), ([], "3", 3), (["--spares", "0"], "3", 0)])
def test_the_number_of_spare_ranks_is_that_of_the_option_or_the_variable(
    monkeypatch: pytest.MonkeyPatch, option: list[str], variable: str, spares: int | None
) -> None:
    monkeypatch.setenv("PARALLEL_DIT_SPARES", variable)
    monkeypatch.setenv("PARALLEL_DIT_CPU_RANKS", "1")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(["--connect", "10.0.0.1", "--interface", "lo", "--node", "1", *option])
    assert command.parse(options, command.Launched()).spares == spares


def test_devices_are_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DIT_CPU_RANKS", "3")
    assert local_devices("all") == Devices(kind="cpu", indices=(0, 1, 2))
    with pytest.raises(InvalidRequest, match="'gpu' is not a device"):
        local_devices("gpu")
