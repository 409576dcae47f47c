"""A supervisor's side and the agent of another host in one process, with programs that stand in for ranks."""

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallel_backend.machines.links.address import Address
from parallel_backend.machines.nodes.hosts import Hosts
from parallel_backend.machines.nodes.session import Session
from parallel_backend.protocol import frames
from parallel_backend.protocol.deadlines import Deadline
from parallel_backend.protocol.hosts import HostInfo, versions
from parallel_backend.protocol.messages import Done
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.limits import Patience
from parallel_backend.supervisor.log_files import LogFiles
from parallel_backend.supervisor.ranks.failures import Failure
from parallel_backend.supervisor.ranks.rank_set import RankSet
from parallel_backend.supervisor.ranks.spares import Spares

READY = """
import os, socket, sys, time
control = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
control.send(b'{"type":"Ready"}')
print("hello from", os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""
WAITS = """
import json, os, socket, sys
if "--spare" in sys.argv:
    control = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
    control.send(b'{"type":"Prepared"}')
    text, (output, *_), *_ = socket.recv_fds(control, 1 << 16, 4)
    control.detach()
    os.environ.update(json.loads(text)["environment"])
    os.dup2(output, 1)
    if os.path.exists("dies"):
        sys.exit("a spare one")
"""
SLEEPS = READY + "time.sleep(60)"
FAILS = (
    READY
    + """
if os.environ["RANK"] == "1":
    sys.exit("nothing works here")
time.sleep(60)
"""
)
TWO_HOSTS = Devices(kind="cpu", indices=(0, 0, 1), hosts=("", "b", "b"))
INFO = HostInfo(name="b", node=1, address="10.9.8.7", devices=Devices(kind="cpu", indices=(0, 1)), versions=versions())


class Machines:
    """A supervisor's side, and host ``b`` in a thread.

    Attributes:
        events: the supervisor's event loop.
        hosts: the supervisor's hosts.
        session: what the agent of ``b`` does.
        why: why the agent's session ended.
        idle: what the supervisor says of itself.
    """

    def __init__(self, folder: Path, program: str, spares: int) -> None:
        self.events, self.logs = EventLoop(), LogFiles(folder / "logs")
        self._command = (sys.executable, "-c", program)
        self.hosts = Hosts(nodes=2, interface="eth7", devices=None, events=self.events)
        self.idle, self._agent_events = True, EventLoop()
        self.spares = Spares(command=self._command, number=spares, events=self._agent_events, devices=INFO.devices)
        self.sets: list[RankSet] = []
        self.why: list[str] = []
        self._agent = ThreadPoolExecutor(1)  # its thread stays: with it, spare ranks end

    def join(self) -> None:
        """Have ``b`` join, and serve it."""
        ours, theirs = socket.socketpair()
        self.hosts.join(ours, INFO, same_program=True)
        assert frames.recv_header(theirs, deadline=Deadline(5.0, "an answer")).message == Done()
        self.session = Session(
            theirs, first_host=Address(host="127.0.0.1", port=1), devices=INFO.devices, interface="eth7",
            events=self._agent_events, spares=self.spares, command=self._command,
        )  # fmt: skip
        self._agent.submit(lambda: self.why.append(self.session.serve()))

    def start(self, devices: Devices = TWO_HOSTS) -> RankSet:
        """Start a set of ranks."""
        ranks = RankSet(
            generation=len(self.sets), devices=devices, logs=self.logs, command=self._command,
            patience=Patience(), events=self.events, on_finished=lambda *_: None, hosts=self.hosts,
        )  # fmt: skip
        self.sets.append(ranks)
        ranks.start()
        return ranks

    def until(self, happened: Callable[[], object], seconds: float = 20.0) -> None:
        """Run the supervisor's loop until something is true."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end
            self.events.run_once(0.05)
            self.hosts.tick(idle=self.idle)

    def verdict(self, ranks: RankSet) -> Failure:
        """Return why a set fails."""
        found: list[Failure] = []

        def look() -> bool:
            failure = ranks.verdict()
            found.extend([failure] if failure else [])
            return bool(found)

        self.until(look)
        return found[0]

    def close(self) -> None:
        """End everything."""
        for ranks in self.sets:
            ranks.kill()
        self.until(lambda: all(ranks.exited for ranks in self.sets))
        self.hosts.close()
        self._agent.submit(self._end_spares).result(20.0)
        self._agent.shutdown()
        self.logs.close()

    def _end_spares(self) -> None:
        self.spares.kill()
        while not self.spares.exited:
            self._agent_events.run_once(5.0)
