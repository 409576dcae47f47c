"""``torchrun`` and gloo over the hosts of a network: what ranks are told, that they add up, and where they listen."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.processes import wait_until

from . import hosts
from .conftest import NewNetwork
from .hosts import Host

PORT = 29500
PATIENCE = 240.0  # every rank and every agent imports torch

RANK = """
import datetime, json, os, pathlib, sys, time
import torch
import torch.distributed as dist

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(value)
report = {"pid": os.getpid(), "sum": value.item(), **{name: os.environ[name] for name in names}}
home = pathlib.Path.home()
home.joinpath("written").write_text(json.dumps(report))
home.joinpath("written").rename(home / "report.json")
while sys.argv[1:] == ["stay"]:
    time.sleep(1)
dist.destroy_process_group()  # a process that ends with its threads running sometimes hangs or aborts
"""


def start(ranks: Sequence[Host], *arguments: str) -> list["subprocess.Popen[str]"]:
    """One agent on each host, each of which starts one rank."""
    agents = []
    for number, host in enumerate(ranks):
        script = host.folder / "rank.py"
        script.write_text(RANK)
        layout = ["--nnodes", str(len(ranks)), "--nproc-per-node", "1", "--node-rank", str(number)]
        meet = ["--rdzv-backend", "static", "--master-addr", ranks[0].address, "--master-port", str(PORT)]
        command = [sys.executable, "-m", "torch.distributed.run", *layout, *meet, str(script), *arguments]
        with open(host.folder / "agent.log", "w") as log:
            agents.append(host.popen(command, {"GLOO_SOCKET_IFNAME": host.interface}, output=log))
    return agents


def report(host: Host) -> dict[str, Any]:
    """What the host's rank was told and what it found."""
    path = host.folder / "home" / "report.json"
    wait_until(path.exists, PATIENCE, f"{path} exists")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_several_hosts_add_up(new_network: NewNetwork, size: int):
    ranks = new_network(*(f"host{number}" for number in range(size)))
    agents = start(ranks)
    for agent, host in zip(agents, ranks, strict=True):
        assert agent.wait(PATIENCE) == 0, Path(host.folder / "agent.log").read_text()
    expected = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": ranks[0].address, "MASTER_PORT": str(PORT)}
    for number, host in enumerate(ranks):
        found = report(host)
        assert {name: found[name] for name in ["RANK", *expected]} == {"RANK": str(number), **expected}
        assert found["sum"] == int("1" * size)
        assert hosts.sent_bytes(host) > 1000


def test_gloo_listens_at_its_interface_and_the_store_everywhere(two_hosts: tuple[Host, ...]):
    agents = start(two_hosts, "stay")
    for number, host in enumerate(two_hosts):
        rank = report(host)["pid"]
        listening = {(socket.pid, socket.address) for socket in hosts.listeners(host)}
        store = {(agents[0].pid, "*")} if number == 0 else set()
        assert listening == {(rank, host.address)} | store


def test_a_store_on_a_loopback_socket_stays_there(two_hosts: tuple[Host, ...]):
    script = """
import socket, time
from torch.distributed import TCPStore
bound = socket.create_server(("127.0.0.1", 0))
port = bound.getsockname()[1]
store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())
TCPStore("127.0.0.1", store.port).set("key", "value")
print(store.port, store.get("key").decode(), flush=True)
time.sleep(1000)
"""
    alpha = two_hosts[0]
    process = alpha.popen([sys.executable, "-c", script], {"TORCH_CPP_LOG_LEVEL": "ERROR"})
    assert process.stdout is not None
    port, value = process.stdout.readline().split()
    assert value == "value"
    assert hosts.listeners(alpha) == [hosts.Listener(address="127.0.0.1", port=int(port), pid=process.pid)]
