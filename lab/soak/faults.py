"""Faults of a working backend, and their allowed outcomes."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from parallel_backend.client.client import Client
from parallel_backend.errors import BackendError, BackendUnavailable, Cancelled
from parallel_backend.protocol.endpoint import connect

NAP = 3.0
"""Seconds for which processes are stopped that go on by themselves, as after a machine has slept."""
CONNECT = 5.0
"""Seconds to connect to a backend that may be stopped."""


@dataclass(kw_only=True)
class Target:
    """A backend that works on a request.

    Attributes:
        client: of the backend.
        chooser: chooses ranks.
        most_ranks: largest number of a prompt's ranks.
        interrupt: tells the request's client to interrupt it.
        held: connections that stay open until the request has ended.
    """

    client: Client
    chooser: random.Random
    most_ranks: int
    interrupt: threading.Event = field(default_factory=threading.Event)
    held: list[socket.socket] = field(default_factory=list)

    def rank(self) -> int:
        """Return the process id of a random rank."""
        return self.chooser.choice(self.ranks())

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks.

        Raises:
            BackendUnavailable: there are none.
        """
        pids = [rank.pid for rank in self.client.status().ranks]
        if not pids:
            raise BackendUnavailable("no ranks run")
        return pids

    def spare(self) -> int:
        """Return the process id of a random spare rank.

        Raises:
            BackendUnavailable: there are none.
        """
        pids = [spare.pid for spare in self.client.status().spares]
        if not pids:
            raise BackendUnavailable("no spare ranks run")
        return self.chooser.choice(pids)

    def has_spares(self) -> bool:
        """Whether there is a ready spare rank for each rank."""
        return sum(spare.ready for spare in self.client.status().spares) >= self.most_ranks

    def release(self) -> None:
        """Close the connections that are held."""
        for sock in self.held:
            sock.close()

    def supervisor(self) -> int:
        """Return the supervisor's process id."""
        return self.client.status().pid


Inject = Callable[[Target], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of disturbance.

    Attributes:
        inject: does it, and returns at once or after ``NAP`` seconds.
        ends: the error with which the request may end, because the fault asks for it.
        idle: whether it happens before the request instead of during it.
    """

    inject: Inject
    ends: type[BackendError] | None = None
    idle: bool = False


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_rank(target: Target) -> None:
    _signal([target.rank()], signal.SIGKILL)


def _kill_spare(target: Target) -> None:
    _signal([target.spare()], signal.SIGKILL)


def _kill_rank_0(target: Target) -> None:
    _signal(target.ranks()[:1], signal.SIGKILL)


def _kill_all_ranks(target: Target) -> None:
    _signal(target.ranks(), signal.SIGKILL)


def _stop_rank(target: Target) -> None:
    _signal([target.rank()], signal.SIGSTOP)


def _kill_supervisor(target: Target) -> None:
    _signal([target.supervisor()], signal.SIGKILL)


def _stop_supervisor_for_a_while(target: Target) -> None:
    _nap([target.supervisor()])


def _stop_all_for_a_while(target: Target) -> None:
    _nap([target.supervisor(), *target.ranks()])


def _nap(pids: list[int]) -> None:
    _signal(pids, signal.SIGSTOP)
    time.sleep(NAP)
    _signal(pids, signal.SIGCONT)


def _interrupt(target: Target) -> None:
    target.interrupt.set()


def _stop_backend(target: Target) -> None:
    with suppress(BackendError):
        target.client.stop()


def _send_garbage(target: Target) -> None:
    for sent in (os.urandom(100), b"PDiT" + os.urandom(60), b"PDiT\x00\x02\x7f\xff\xff\xff" + b"[" * 1000):
        _send(target, sent)


def _leave_connections(target: Target) -> None:
    for _ in range(20):
        target.held.append(connect(target.client.endpoint, seconds=CONNECT))
        target.held[-1].sendall(b"PDiT", socket.MSG_NOSIGNAL)


def _send(target: Target, sent: bytes) -> None:
    with suppress(BackendUnavailable, OSError), connect(target.client.endpoint, seconds=CONNECT) as sock:
        sock.sendall(sent, socket.MSG_NOSIGNAL)


FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": Fault(inject=_kill_rank),
    "SIGKILL of rank 0": Fault(inject=_kill_rank_0),
    "SIGKILL of all ranks": Fault(inject=_kill_all_ranks),
    "SIGKILL of an idle rank": Fault(inject=_kill_rank, idle=True),
    "SIGKILL of a spare rank": Fault(inject=_kill_spare),
    "SIGSTOP of a rank": Fault(inject=_stop_rank),
    "SIGKILL of the supervisor": Fault(inject=_kill_supervisor),
    "SIGKILL of the idle supervisor": Fault(inject=_kill_supervisor, idle=True),
    "SIGSTOP of the supervisor for a while": Fault(inject=_stop_supervisor_for_a_while),
    "SIGSTOP of all for a while": Fault(inject=_stop_all_for_a_while),
    "interrupt": Fault(inject=_interrupt, ends=Cancelled),
    "stop of the backend": Fault(inject=_stop_backend, ends=BackendUnavailable),
    "garbage on the socket": Fault(inject=_send_garbage),
    "connections that say nothing": Fault(inject=_leave_connections),
}
"""All disturbances, by what the ledger calls them."""
