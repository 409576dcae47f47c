"""The network of hosts itself: who reaches whom, links, bytes, processes, and that nothing is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from scripts import processes
from scripts.processes import wait_until

from . import hosts, network
from .conftest import NewNetwork
from .hosts import Host, tool

PORT = 4711
PATIENCE = 60.0

RECEIVE = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    while True:
        connection, peer = server.accept()
        with connection:
            total = 0
            while chunk := connection.recv(1 << 20):
                total += len(chunk)
            connection.sendall(str(total).encode())
"""
SEND = f"""
import socket, sys, time
with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[3])) as connection:
    started = time.monotonic()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    assert int(connection.recv(100)) == int(sys.argv[2])
    print(time.monotonic() - started)
"""


def python(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]


def started(process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """A process, once it has printed that it started."""
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def start_receiver(host: Host) -> None:
    process = host.popen(python(RECEIVE), output=subprocess.DEVNULL)
    wait_until(
        lambda: [socket.pid for socket in hosts.listeners(host)] == [process.pid], PATIENCE, "the receiver listens"
    )


def send(host: Host, target: str, size: int = 1, seconds: float = PATIENCE) -> float | None:
    """Seconds until the receiver on ``target`` confirmed all bytes, or None if it was not reached."""
    done = host.run(python(SEND, target, size, seconds), seconds=2 * PATIENCE)
    return None if done.returncode else float(done.stdout)


def test_hosts_reach_each_other_by_name_and_address(new_network: NewNetwork):
    alpha, beta, gamma = new_network("alpha", "beta", "gamma")
    start_receiver(beta)
    assert send(alpha, "beta") is not None
    assert send(gamma, beta.address) is not None
    assert send(beta, "beta") is not None


def test_hosts_reach_nothing_else(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    start_receiver(beta)
    with socket.create_server(("0.0.0.0", 0)) as machine:
        machine.settimeout(0)
        script = "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
        reached = alpha.run(python(script, "127.0.0.1", machine.getsockname()[1]))
        assert int(reached.stdout) != 0, "the host reaches a server of the machine"
        with pytest.raises(BlockingIOError):
            machine.accept()
    routes = json.loads(tool("ip", "-n", alpha.namespace, "-j", "route"))
    assert [(route["dst"], route["dev"]) for route in routes] == [(f"{beta.address[:-1]}0/24", alpha.interface)]
    assert send(alpha, "127.0.0.1") is None, "both hosts share a loopback interface"


def test_the_machine_keeps_its_own_network(new_network: NewNetwork):
    def state() -> tuple[str, str, str]:
        return tool("ip", "-j", "address"), tool("ip", "-j", "route"), Path("/proc/sys/net/ipv4/ip_forward").read_text()

    before, machine_name = state(), socket.gethostname()
    (alpha,) = new_network("alpha")
    assert alpha.run(["hostname"]).stdout == "alpha\n"
    assert state() == before
    assert socket.gethostname() == machine_name


def test_two_networks_live_side_by_side(new_network: NewNetwork):
    first, second = new_network("alpha"), new_network("alpha")
    start_receiver(first[0])
    assert send(second[0], "alpha", seconds=5) is None
    assert send(first[0], "alpha") is not None


def test_a_link_is_cut_and_comes_back(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    start_receiver(beta)
    hosts.link_down(alpha)
    assert send(alpha, "beta", seconds=2) is None
    assert send(beta, "beta") is not None, "the other host needs no link for itself"
    hosts.link_up(alpha)
    # The search for the other's hardware address, which began without a link, may still fail.
    wait_until(lambda: send(alpha, "beta"), PATIENCE, "the other host is reached again")


def test_a_connection_outlives_a_short_cut(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    start_receiver(beta)
    script = SEND.replace("    started", "    print('started', flush=True); started")
    sender = started(alpha.popen(python(script, "beta", 20_000_000, PATIENCE)))
    hosts.link_down(alpha)
    hosts.link_up(alpha)
    assert sender.wait(PATIENCE) == 0


def test_a_rate_limits_what_a_host_sends(new_network: NewNetwork):
    if reason := network.can_shape():
        pytest.skip(reason)
    size = 4_000_000
    seconds = []
    for rate in ("20mbit", None):
        alpha, beta = new_network("alpha", "beta", rate=rate)
        start_receiver(beta)
        seconds.append(send(alpha, "beta", size))
    shaped, unshaped = seconds
    assert shaped is not None
    assert unshaped is not None
    assert 8 * size / shaped < 25e6, "bits a second"
    assert shaped / unshaped > 5


def test_sent_bytes_are_counted_at_the_sender(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    start_receiver(beta)
    before = [hosts.sent_bytes(host) for host in two_hosts]
    send(alpha, "beta", 1_000_000)
    from_alpha, from_beta = (hosts.sent_bytes(host) - sent for host, sent in zip(two_hosts, before, strict=True))
    assert 1_000_000 < from_alpha < 1_200_000
    assert from_beta < 200_000
    send(beta, "beta", 1_000_000)
    assert hosts.sent_bytes(beta) - before[1] < 400_000, "what a host sends to itself does not cross its link"


def test_listeners_tell_what_each_is_bound_to(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    script = """
        import socket, sys, time
        v4 = [socket.create_server((address, 0)) for address in ("127.0.0.1", "0.0.0.0", sys.argv[1])]
        v6 = [socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=dual) for dual in (True, False)]
        print(*[server.getsockname()[1] for server in v4 + v6], flush=True)
        time.sleep(1000)
    """
    process = alpha.popen(python(script, alpha.address))
    assert process.stdout is not None
    ports = map(int, process.stdout.readline().split())
    addresses = ["127.0.0.1", "0.0.0.0", alpha.address, "*", "::"]
    expected = {
        hosts.Listener(address=address, port=port, pid=process.pid)
        for address, port in zip(addresses, ports, strict=True)
    }
    assert set(hosts.listeners(alpha)) == expected
    assert hosts.listeners(beta) == []


def test_each_host_has_its_own_places(new_network: NewNetwork, tmp_path: Path):
    (tmp_path / "of the machine").touch()
    alpha, beta = new_network("alpha", "beta", own=("/tmp", str(tmp_path)))
    script = """
        import os, pathlib, sys
        variables = ("HOME", "XDG_RUNTIME_DIR", "PARALLEL_DIT_RUNTIME", "PARALLEL_DIT_LOGS")
        for folder in ["/tmp", "/dev/shm", *sys.argv[1:], *map(os.environ.get, variables)]:
            path = pathlib.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            print(*(found.name for found in path.iterdir()), end=";")
            path.joinpath(os.uname().nodename).touch()
        print(sorted(os.listdir("/sys/class/net")), pathlib.Path("/proc/sys/kernel/random/boot_id").read_text())
        print(*os.listdir("/sys/fs/cgroup"))
    """
    first = alpha.run(python(script, tmp_path, alpha.here))
    second = beta.run(python(script, tmp_path, alpha.here))
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert "alpha" not in second.stdout
    assert "of the machine" not in first.stdout + second.stdout
    seen = [(*done.stdout.splitlines()[0].rpartition(";")[2].rpartition(" ")[::2],) for done in (first, second)]
    assert [interfaces for interfaces, _ in seen] == [str([host.interface, "lo"]) for host in (alpha, beta)]
    assert seen[0][1] != seen[1][1], "both hosts have one boot id"
    assert alpha.outside(str(tmp_path)).joinpath("alpha").exists()
    assert alpha.folder.joinpath("alpha").exists()
    assert not tmp_path.joinpath("alpha").exists()
    assert alpha.run(["ls", str(tmp_path)]).stdout == "alpha\n", "a later process finds what an earlier one wrote"
    assert set(os.listdir("/sys/fs/cgroup")) <= set(first.stdout.split()), "the control groups are still there"


ORPHANS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, stdout=subprocess.DEVNULL)
if os.fork():
    print("started", flush=True)
    time.sleep(1000)
time.sleep(1000)
"""


def test_kill_all_ends_every_process_of_one_host(two_hosts: tuple[Host, ...]):
    alpha, beta = two_hosts
    first = started(alpha.popen(python(ORPHANS)))
    started(beta.popen(python(ORPHANS)))
    assert len(hosts.pids(alpha)) == 3, "its own, a forked one, and one without environment in its own session"
    hosts.kill_all(alpha)
    assert hosts.pids(alpha) == []
    assert first.returncode == -signal.SIGKILL
    assert len(hosts.pids(beta)) == 3


def test_a_command_that_takes_too_long_is_killed(two_hosts: tuple[Host, ...]):
    alpha = two_hosts[0]
    with pytest.raises(subprocess.TimeoutExpired):
        alpha.run(["sleep", "1000"], seconds=1)
    assert hosts.pids(alpha) == []


def test_nothing_is_left_of_a_test_that_fails():
    living: list[psutil.Process] = []
    made: list[Host] = []

    def fails() -> None:
        with network.network(["alpha"]) as (alpha,):
            started(alpha.popen(python(ORPHANS)))
            living.extend(psutil.Process(pid) for pid in hosts.pids(alpha))
            made.append(alpha)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(living) == 3
    assert not [process for process in living if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert made[0].namespace not in tool("ip", "netns", "list")
    assert made[0].switch not in tool("ip", "netns", "list")
    assert not made[0].folder.parent.exists()


def test_what_is_left_fails_the_test(monkeypatch: pytest.MonkeyPatch):
    made: list[Host] = []

    def leaves_a_process() -> None:
        with network.network(["alpha"]) as (alpha,):
            made.append(alpha)
            started(alpha.popen(python("import time; print('started', flush=True); time.sleep(1000)")))
            monkeypatch.setattr(hosts, "kill_namespace", lambda namespace: None)
            monkeypatch.setattr(hosts, "reap", lambda host: None)

    with pytest.raises(RuntimeError, match=r"left \[.\d+: .*time.sleep"):
        leaves_a_process()
    processes.kill(processes.find(hosts.MARK, lambda value: value == made[0].network))
    monkeypatch.undo()
    hosts.reap(made[0])


def test_the_next_network_removes_that_of_a_killed_run(new_network: NewNetwork):
    script = """
        import os, signal, sys
        from tests.machines import network
        with network.network(["alpha"]) as (alpha,):
            alpha.popen(["sleep", "1000"])
            print(alpha.namespace, alpha.folder.parent, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run(python(script), cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    namespace, folder = killed.stdout.split()
    assert namespace in tool("ip", "netns", "list")
    new_network("alpha")
    assert namespace not in tool("ip", "netns", "list")
    assert not processes.find(hosts.MARK, lambda value: value == namespace.removesuffix("-alpha"))
    assert not Path(folder).exists()
