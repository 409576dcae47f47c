"""Ranks on another host, whose agent runs in a thread here: started, heard, killed, and lost with their host."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_backend.machines.nodes import hosts as hosts_module
from parallel_backend.machines.nodes import session as session_module
from parallel_backend.machines.nodes.hosts import Hosts
from parallel_backend.processes import wait_for_exit
from parallel_backend.protocol import frames
from parallel_backend.protocol.deadlines import Deadline
from parallel_backend.protocol.hosts import HostInfo
from parallel_backend.protocol.messages import Done, Error
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.ranks.rank_start import NotStarted
from tests.support.two_machines import FAILS, INFO, SLEEPS, WAITS, Machines


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[str], Machines]]:
    made: list[Machines] = []

    def make(program: str, spares: int = 0) -> Machines:
        made.append(Machines(tmp_path, program, spares))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_ranks_of_another_host_start_report_and_end(machines: Callable[[str], Machines], tmp_path: Path) -> None:
    both = machines(SLEEPS)
    both.join()
    ranks = both.start()
    both.until(lambda: ranks.ready)
    both.until(lambda: all(status.memory for status in ranks.statuses()))
    assert [rank.process.host for rank in ranks.ranks] == ["", "b", "b"]
    assert ranks.ranks[2].name == f"rank 2 (pid {ranks.ranks[2].process.pid} on b)"
    log = tmp_path / "logs" / "rank2.log"
    both.until(lambda: log.exists() and "hello from 2 1 eth7" in log.read_text())
    assert ranks.ranks[1].process.activity() is not None
    ranks.kill()
    both.until(lambda: ranks.exited)
    for rank in ranks.ranks:
        assert wait_for_exit(rank.process.pid, 5.0)
        assert rank.process.activity() is None
        assert rank.process.describe_exit() == "was killed by SIGKILL"


def test_a_rank_of_another_host_that_ends_is_named_with_its_last_words(machines: Callable[[str], Machines]) -> None:
    both = machines(FAILS)
    both.join()
    failure = both.verdict(both.start())
    assert " on b) exited with status 1: nothing works here (log: " in failure.message
    assert failure.message.startswith("rank 1 (pid ")


def test_spare_ranks_of_another_host_become_ranks_and_outlive_the_connection(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    both = machines(WAITS + SLEEPS, spares=2)
    both.join()

    def ready() -> list[int]:
        return [spare.pid for spare in both.hosts.spares() if spare.ready and spare.host == "b"]

    both.until(lambda: len(ready()) == 2)
    waiting = ready()
    both.idle = False
    ranks = both.start()
    both.until(lambda: ranks.ready)
    assert [rank.process.was_spare for rank in ranks.ranks] == [False, True, True]
    assert ranks.uses_spares
    assert {rank.process.pid for rank in ranks.ranks[1:]} == set(waiting)
    log = tmp_path / "logs" / "rank2.log"
    both.until(lambda: log.exists() and "hello from 2 1 eth7" in log.read_text())
    asked = time.monotonic()
    both.until(lambda: time.monotonic() > asked + 2.5)
    assert not both.hosts.spares()
    both.idle = True
    both.until(lambda: len(ready()) == 2)
    new = ready()
    both.session._end("is closed by the test")
    assert all(wait_for_exit(pid, 10.0) for pid in waiting)
    both.until(lambda: both.hosts.statuses()[1].state == "lost")
    assert not both.hosts.spares()
    both.join()
    both.until(lambda: ready() == new)


def test_a_set_whose_spare_ranks_die_is_known_for_it(
    machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dies").touch()
    both = machines(WAITS + SLEEPS, spares=1)
    both.join()
    both.until(lambda: [spare.ready for spare in both.hosts.spares()] == [True])
    both.idle = False
    failure = both.verdict(both.start())
    assert " on b) exited with status 1" in failure.message
    assert both.sets[-1].uses_spares
    both.sets[-1].kill()
    both.until(lambda: both.sets[-1].exited)
    again = both.start()
    both.until(lambda: again.ready)
    assert not again.uses_spares


def test_a_host_that_is_lost_while_its_ranks_start_is_not_asked_for_more(machines: Callable[..., Machines]) -> None:
    both = machines(SLEEPS)
    both.join()
    both.until(lambda: both.hosts.statuses()[1].round_trip is not None)
    both.hosts._links["b"]._stream._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(NotStarted, match=r"host b \(10.9.8.7\) closed its connection") as error:
        both.start()
    assert error.value.ranks == (2,)


@pytest.mark.parametrize("how", ["closes", "is silent", "sends rubbish"])
def test_a_lost_host_is_named_and_its_ranks_end(
    machines: Callable[[str], Machines], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    both = machines(SLEEPS)
    both.join()
    ranks = both.start()
    both.until(lambda: ranks.ready)
    pids = [rank.process.pid for rank in ranks.ranks[1:]]
    if how == "closes":
        both.session._end("is closed by the test")
    elif how == "sends rubbish":
        both.session._stream._sock.send(b"\0\0\0\2{]")
    else:
        monkeypatch.setattr(hosts_module, "SILENCE", 1.0)
        monkeypatch.setattr(both.session, "_handle", lambda message: None)
    failure = both.verdict(ranks)
    words = {
        "closes": "which closed its connection",
        "sends rubbish": "which sent what is no message",
        "is silent": r"which has not answered for [1-9] s",
    }
    assert re.search(r" is lost with its host b \(10\.9\.8\.7\), " + words[how], failure.message)
    both.until(lambda: both.why)
    assert all(wait_for_exit(pid, 5.0) for pid in pids)
    (first, other) = both.hosts.statuses()
    assert (first.node, other.node, other.state, other.name) == (0, 1, "lost", "b")
    both.join()
    assert [host.state for host in both.hosts.statuses()] == ["joined", "joined"]


def test_an_agent_ends_its_ranks_when_the_supervisor_says_nothing(
    machines: Callable[[str], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = machines(SLEEPS)
    both.join()
    ranks = both.start()
    both.until(lambda: ranks.ready)
    pids = [rank.process.pid for rank in ranks.ranks[1:]]
    monkeypatch.setattr(session_module, "SILENCE", 1.0)
    assert all(wait_for_exit(pid, 10.0) for pid in pids)
    both.until(lambda: both.why)
    (why,) = both.why
    assert re.fullmatch(r"has not sent anything for [1-9] s", why)


def test_a_host_that_is_not_there_fails_the_start_of_its_ranks_alone(machines: Callable[[str], Machines]) -> None:
    both = machines(SLEEPS)
    with pytest.raises(NotStarted, match="host b has not joined") as error:
        both.start()
    assert error.value.ranks == (1, 2)
    both.join()
    both.session._end("is closed by the test")
    both.until(lambda: both.hosts.statuses()[1].state == "lost")
    with pytest.raises(NotStarted, match=r"host b \(10.9.8.7\) closed its connection"):
        both.start()


@pytest.mark.parametrize(
    ("info", "same_program", "words"),
    [
        (replace(INFO, node=2), True, "host b has the number 2, and the backend was started for 2 hosts: --nnodes 3"),
        (
            replace(INFO, versions=INFO.versions | {"torch": "1.0"}),
            True,
            "host b has torch 1.0, and the first host has",
        ),
        (INFO, False, "host b has another version of Parallel DiT"),
    ],
    ids=["number", "torch", "program"],
)
def test_hosts_that_do_not_fit_are_refused(info: HostInfo, same_program: bool, words: str) -> None:
    hosts = Hosts(nodes=2, interface="eth7", devices=None, events=EventLoop())
    ours, theirs = socket.socketpair()
    with theirs:
        hosts.join(ours, info, same_program=same_program)
        answer = frames.recv_header(theirs, deadline=Deadline(5.0, "an answer")).message
    assert isinstance(answer, Error)
    assert answer.code == "invalid_request"
    assert words in answer.message
    assert [host.state for host in hosts.statuses()] == ["joined", "missing"]


def test_a_second_host_of_the_same_name_takes_the_place_of_a_silent_one_alone(
    machines: Callable[[str], Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = machines(SLEEPS)
    both.join()
    ours, theirs = socket.socketpair()
    with theirs:
        both.hosts.join(ours, INFO, same_program=True)
        answer = frames.recv_header(theirs, deadline=Deadline(5.0, "an answer")).message
    assert isinstance(answer, Error)
    assert answer.message == "a host with the name b has joined from 10.9.8.7: give it another one"
    monkeypatch.setattr(hosts_module, "REPLACE", 0.0)
    ours, theirs = socket.socketpair()
    with theirs:
        both.hosts.join(ours, INFO, same_program=True)
        assert frames.recv_header(theirs, deadline=Deadline(5.0, "an answer")).message == Done()
    both.until(lambda: both.why)
