"""What a rank of another host says arrives, however late the supervisor reads it."""

import os
import socket

import msgspec
import pytest

from parallel_backend.machines.nodes import remote_process
from parallel_backend.machines.nodes.remote_process import RemoteProcess
from parallel_backend.protocol import rank_control
from parallel_backend.protocol.status import RankStatus
from parallel_backend.supervisor.event_loop import EventLoop

HEARTBEAT = rank_control.Heartbeat(status=RankStatus(rank=1, pid=2, device="x" * 60_000, memory=0))


@pytest.fixture
def events():
    return EventLoop()


@pytest.fixture
def killed():
    return []


@pytest.fixture
def process(events, killed):
    made = RemoteProcess(host="b", output=1, kill=lambda: killed.append(True), events=events)
    yield made
    made.control.close()
    made.ended(0)
    events.run_once(0)  # what waits finds nobody
    os.close(made.exited)


def say(process, *messages):
    for message in messages:
        process.said(msgspec.json.encode(message))


def fill(process):
    """Have the rank send heartbeats until no more fit into the socket."""
    for _ in range(1000):
        say(process, HEARTBEAT)
    return len(read(process, only=0))


def read(process, *, only=None):
    """Return the kinds of the messages that can be read, without reading more than ``only``."""
    found: list[str] = []
    while only is None or len(found) < only:
        try:
            found.append(type(rank_control.receive(process.control, rank_control.FromRank)[0]).__name__)
        except (BlockingIOError, ConnectionError):
            break
    return found


def test_only_heartbeats_are_lost_while_nobody_reads(process, events):
    fill(process)
    finished = rank_control.Finished(request_id="7", code=rank_control.DONE)
    say(process, rank_control.Ready(), HEARTBEAT, finished)
    process.ended(1)
    assert not exit_is_told(process), "the supervisor first reads what the process said"
    found = read(process)
    assert set(found) == {"Heartbeat"}
    events.run_once(0.1)
    assert read(process) == ["Ready", "Finished"]
    assert exit_is_told(process)
    events.run_once(0)
    assert events.internal_errors == 0


def exit_is_told(process):
    try:
        os.eventfd_read(process.exited)
    except BlockingIOError:
        return False
    return True


def test_messages_keep_their_order(process, events):
    fill(process)
    say(process, *(rank_control.Prepared() for _ in range(5)))
    read(process, only=1)
    say(process, rank_control.Ready())  # there is room, but others wait
    read(process)
    events.run_once(0.1)
    assert read(process) == ["Prepared"] * 5 + ["Ready"]


def test_a_set_that_has_been_killed_hears_of_the_exit(process, events):
    fill(process)
    say(process, rank_control.Ready())
    process.control.close()
    process.ended(-9)
    events.run_once(0.1)
    assert exit_is_told(process)


def test_a_rank_that_says_too_much_is_killed(process, monkeypatch, killed):
    monkeypatch.setattr(remote_process, "_MAX_WAITING", 2)
    fill(process)
    say(process, rank_control.Ready(), rank_control.Ready())
    assert not killed
    say(process, rank_control.Ready())
    assert killed == [True]


def test_what_is_no_message_arrives_as_well(process, events):
    fill(process)
    process.said(b'"no JSON"')
    read(process)
    events.run_once(0.1)
    assert process.control.recv(100, socket.MSG_DONTWAIT) == b'"no JSON"'
